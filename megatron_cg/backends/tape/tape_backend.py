"""A backend without a GPU: it records ATen operations on a tape instead of a CUDA graph.

The contract is that of ``make_graphed_callables`` in transformer-engine 2.20.2
(``transformer_engine/pytorch/graph.py``): the same refusals and the same warmup. Hooks run outside
of the recording. ``torch.autograd.backward`` collects gradients, with ``.grad`` removed before.
Parameter gradients are returned as clones. So a post-accumulate-grad hook that was left on a
parameter fires in warmup and capture here, as it does in TE.

It reproduces these properties of a graph: no Python of the module runs at a replay, arguments are
addresses and not Python tensors, memory is poisoned as soon as other graphs of the pool might use
it, and a copy between host and device is refused. It does not reproduce kernels, streams or speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from megatron_cg.backends.tape.tape_graphs import Recorded, TapeCallable, storage_keys
from megatron_cg.backends.tape.tape_memory import Pool
from megatron_cg.backends.tape.tape_recording import recording
from megatron_cg.errors import CaptureError, HookError
from megatron_cg.fsdp.transform import CAPTURE_TIME_KEYS
from megatron_cg.hooks import HookKind
from megatron_cg.hooks.capture_schedule import Step, schedule
from megatron_cg.memory.scratch import ScratchMemory
from megatron_cg.replay.guard.objects import Entry
from megatron_cg.replay.replay_function import ReplayFunction

Hooks = Mapping[str, Mapping[int, Callable[[nn.Module], None]]]

#: Options of make_graphed_callables that ask for FP8, and those without effect on the tape.
_FP8_OPTIONS = ("enabled", "fp8_enabled", "calibrating", "fp8_calibrating")
_IDLE_OPTIONS = frozenset(
    {*_FP8_OPTIONS, "pool", "recipe", "fp8_recipe", "amax_reduction_group", "fp8_group"}
    | {"cache_quantized_params", "fp8_weight_caching"}
)


class TapeBackend:
    """Records layers on tapes; the module's docstring says what they reproduce."""

    name = "tape"

    def capture(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        *,
        capture_time_hooks: Sequence[Hooks],
        sample_kwargs: Sequence[Mapping[str, Any]] | None = None,
        num_warmup_iters: int = 3,
        allow_unused_input: bool = False,
        retain_graph_in_backward: bool = False,
        pre_warmup_hook: Callable[[], None] | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
        _order: Sequence[int] | None = None,
        _num_layers_per_chunk: Sequence[int] | None = None,
        _reuse_graph_input_output_buffers: bool = False,
        clone_param_grads_on_return: bool = True,
        **options: Any,
    ) -> tuple[TapeCallable, ...]:
        """Warm ``callables`` up and record them; see :class:`megatron_cg.backends.base.Backend`.

        The named options are TE's, with TE's defaults; FP8 is refused.

        Raises:
            CaptureError: samples and callables do not match, an option is unknown or asks for
                FP8, an output is not a tensor, or an input that needs a gradient gets none.
            HookError: a module still has hooks, a buffer needs a gradient, or a capture-time
                hook has an unknown key or returns a value.
            HostSyncError: a callable reads a tensor on the host.
        """
        _check_options(options, clone_param_grads_on_return)
        _check_modules(callables)
        _check_hooks(callables, capture_time_hooks)
        kwargs = sample_kwargs or [{} for _ in sample_args]
        steps = schedule(len(callables), len(sample_args), _order, _num_layers_per_chunk)
        run = _Capture(callables, sample_args, kwargs, capture_time_hooks, steps)
        run.allow_unused_input = allow_unused_input
        run.retain_graph = retain_graph_in_backward
        run.share_buffers = _reuse_graph_input_output_buffers
        if pre_warmup_hook is not None:
            pre_warmup_hook()
        for iteration in range(num_warmup_iters):
            run.warm_up(iteration)
        if post_warmup_hook is not None:
            post_warmup_hook()
        run.record()
        return tuple(TapeCallable(item, item.module.forward) for item in run.recorded)

    def replay_function(self, graph: Any) -> ReplayFunction:
        """See :class:`megatron_cg.backends.base.Backend`."""
        found: ReplayFunction = graph.replay_function()
        return found

    def numerics(self) -> None:
        """Nothing: the tape has no FP8."""

    def captured_numerics(self, index: int, options: Mapping[str, Any]) -> None:
        """Nothing: the tape has no FP8."""

    def entries(self, modules: Sequence[nn.Module]) -> list[Entry]:
        """None: a tape uses only parameters and buffers."""
        return []

    def scratch(self) -> ScratchMemory | None:
        """None: tapes use ordinary memory."""
        return None

    def synchronize(self) -> None:
        """Nothing to wait for: a replay has finished when its call returns."""

    def without_updates(self) -> AbstractContextManager[None]:
        """Nothing to skip: the tape has no FP8."""
        return nullcontext()

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        """Always restore the generator's state and the states of Megatron's RNG tracker."""
        tracker = _megatron_tracker()
        generator = torch.default_generator.get_state()
        tracked = dict(tracker.states_) if tracker is not None else {}
        try:
            yield
        finally:
            torch.default_generator.set_state(generator)
            if tracker is not None:
                tracker.states_.clear()
                tracker.states_.update(tracked)


class _Capture:
    """One run of warmup and recording over a schedule."""

    allow_unused_input = False
    retain_graph = False
    share_buffers = False

    def __init__(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        sample_kwargs: Sequence[Mapping[str, Any]],
        hooks: Sequence[Hooks],
        steps: Sequence[Step],
    ) -> None:
        self._callables, self._hooks, self._steps = callables, hooks, steps
        self._args, self._kwargs = sample_args, sample_kwargs
        self._pool = Pool()
        self._grad_outputs: dict[Any, Any] = {}
        layer_of = {step.sample: step.layer for step in steps}
        self.recorded = [
            _surface(callables[layer_of[index]], layer_of[index], args, sample_kwargs[index])
            for index, args in enumerate(sample_args)
        ]

    def warm_up(self, iteration: int) -> None:
        """Run every pass once, in order, recording nothing."""
        alive: dict[int, list[Any]] = {}
        for step in self._steps:
            if step.forward:
                self._run_hooks(step, "forward_pre_hooks")
                outputs = self._call(step)
                self._run_hooks(step, "forward_hooks")
                alive[step.sample] = tree_flatten(outputs)[0]
                continue
            outputs = [o for o in alive.pop(step.sample) if o is not None and o.requires_grad]
            grads = tuple(torch.empty_like(output) for output in outputs)
            self._run_hooks(step, "backward_pre_hooks")
            found = self._gradients(step, tuple(outputs), grads, retain_graph=False)
            self._run_hooks(step, "backward_hooks")
            self._keep_used_parameters(step, found, iteration)

    def record(self) -> None:
        """Record every pass in order, then poison all memory that recording left in the pool."""
        for step in self._steps:
            if step.forward:
                self._record_forward(step)
            else:
                self._record_backward(step)
        self._settle_lifetimes()

    def _call(self, step: Step) -> Any:
        return self._callables[step.layer](*self._args[step.sample], **self._kwargs[step.sample])

    def _run_hooks(self, step: Step, key: str) -> None:
        module = self._callables[step.layer]
        for hook in self._hooks[step.layer].get(key, {}).values():
            if hook(module) is not None:
                raise HookError(
                    f"capture_time_hooks {key} of callable {step.layer} "
                    f"({type(module).__name__}) returned a value; TE ignores no value and "
                    "refuses. Return None."
                )

    def _record_forward(self, step: Step) -> None:
        item = self.recorded[step.sample]
        self._run_hooks(step, "forward_pre_hooks")
        with recording(self._pool, item.module, f"forward of {item.label}") as tape:
            outputs = self._call(step)
        self._run_hooks(step, "forward_hooks")
        flat, item.output_spec = tree_flatten(outputs)
        for output in flat:
            if output is not None and not isinstance(output, torch.Tensor):
                raise CaptureError(
                    f"{item.label} returned a {type(output).__name__}; a graph returns only "
                    "tensors. Leave this module out of --cuda-graph-modules."
                )
        item.forward, item.outputs = tape, tuple(flat)

    def _record_backward(self, step: Step) -> None:
        item = self.recorded[step.sample]
        item.grad_outputs = self._static_grad_outputs(item)
        outputs = tuple(o for o in item.outputs if o is not None and o.requires_grad)
        grads = tuple(grad for grad in item.grad_outputs if grad is not None)
        self._run_hooks(step, "backward_pre_hooks")
        with recording(self._pool, item.module, f"backward of {item.label}") as tape:
            found = iter(self._gradients(step, outputs, grads, self.retain_graph))
        self._run_hooks(step, "backward_hooks")
        item.backward = tape
        item.grad_inputs = tuple(
            next(found) if tensor.requires_grad else None for tensor in item.inputs
        )

    def _static_grad_outputs(self, item: Recorded) -> tuple[torch.Tensor | None, ...]:
        """Return memory for incoming gradients; equal signatures share it if buffers are shared."""
        key = tuple(
            (o.shape, o.dtype) if o is not None and o.requires_grad else None for o in item.outputs
        )
        if not self.share_buffers or key not in self._grad_outputs:
            self._grad_outputs[key] = tuple(
                torch.empty_like(o) if o is not None and o.requires_grad else None
                for o in item.outputs
            )
        made: tuple[torch.Tensor | None, ...] = self._grad_outputs[key]
        return made

    def _gradients(
        self,
        step: Step,
        outputs: tuple[torch.Tensor, ...],
        grads: tuple[torch.Tensor, ...],
        retain_graph: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        inputs = [t for t in self.recorded[step.sample].inputs if t.requires_grad]
        before = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        try:
            torch.autograd.backward(outputs, grad_tensors=grads, retain_graph=retain_graph)
            return tuple(tensor.grad for tensor in inputs)
        finally:
            for tensor, grad in zip(inputs, before, strict=True):
                tensor.grad = grad

    def _keep_used_parameters(
        self, step: Step, grads: tuple[torch.Tensor | None, ...], iteration: int
    ) -> None:
        """Drop parameters that got no gradient, so that none of their hooks fires at a replay."""
        item = self.recorded[step.sample]
        by_input = dict(zip((id(t) for t in item.inputs if t.requires_grad), grads, strict=True))
        user = item.inputs[: item.user_args]
        if not self.allow_unused_input and any(
            t.requires_grad and by_input[id(t)] is None for t in user
        ):
            raise CaptureError(
                f"{item.label}: an input that requires a gradient got none in its backward. "
                "Pass allow_unused_input=True, or make that input not require one."
            )
        used = tuple(p for p in item.parameters if by_input.get(id(p)) is not None)
        if len(used) != len(item.parameters):
            if iteration:
                raise CaptureError(f"{item.label}: which parameters get gradients has changed")
            item.parameters, item.inputs = used, (*user, *used)

    def _settle_lifetimes(self) -> None:
        """Determine when the pool may reuse each storage, and poison everything once.

        If TE shares buffers, outputs live until their own backward, and gradients of inputs until
        the backward after the next one begins. Otherwise both live permanently.
        """
        backwards = [self.recorded[step.sample] for step in self._steps if not step.forward]
        for position, item in enumerate(backwards):
            if item.forward is None or item.backward is None:
                raise CaptureError(f"{item.label}: the order has no forward and backward of it")
            outputs = storage_keys(item.outputs)
            returned = storage_keys(item.grad_inputs[: item.user_args])
            saved = item.forward.made & item.backward.used
            item.dead_after_forward = frozenset(item.forward.made - saved - outputs)
            kept = returned if self.share_buffers else returned | outputs
            item.dead_after_backward = frozenset((item.backward.made | saved | outputs) - kept)
            if self.share_buffers and position >= 2:
                earlier = backwards[position - 2]
                old = storage_keys(earlier.grad_inputs[: earlier.user_args])
                item.dead_before_backward = frozenset(old - item.backward.used)
        for item in backwards:
            for tape in (item.forward, item.backward):
                if tape is not None:
                    self._pool.poison(tape.made)


def _surface(
    module: nn.Module, layer: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Recorded:
    """Return the static input surface of one sample, with nothing recorded yet."""
    flat, _ = tree_flatten((args, list(kwargs.values())))
    label = f"callable {layer} ({type(module).__name__})"
    for value in flat:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"the samples of {label} hold a {type(value).__name__}; a graph takes only tensors"
            )
    parameters = tuple(module.parameters())
    return Recorded(module, label, len(flat), tuple(kwargs), (*flat, *parameters), parameters)


def _check_options(options: Mapping[str, Any], clone_param_grads: bool) -> None:
    unknown = sorted(set(options) - _IDLE_OPTIONS)
    if unknown:
        raise CaptureError(
            f"the tape knows no option {', '.join(unknown)} of make_graphed_callables: leave it out"
        )
    for name in _FP8_OPTIONS:
        asked = options.get(name)
        if any(asked) if isinstance(asked, tuple) else asked:
            raise CaptureError(f"{name} is set: the tape has no FP8. Leave --fp8-format out.")
    if not clone_param_grads:
        raise CaptureError("the tape always clones parameter gradients: leave the option out")


def _check_modules(callables: Sequence[nn.Module]) -> None:
    if not all(module.training for module in callables):
        raise CaptureError("a callable is in evaluation: call .train() before capture")
    for index, module in enumerate(callables):
        held = [kind.value for kind in HookKind if getattr(module, kind.value)]
        if held:
            raise HookError(
                f"callable {index} ({type(module).__name__}) has hooks in {', '.join(held)}: "
                "modules must not have hooks registered at the time they are passed. Take them "
                "off and give those that must run at capture in capture_time_hooks."
            )
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise HookError(
                f"callable {index} ({type(module).__name__}) has a buffer that requires a "
                "gradient: only parameters may be trainable. Make it a parameter."
            )


def _check_hooks(callables: Sequence[nn.Module], hooks: Sequence[Hooks]) -> None:
    if len(hooks) != len(callables):
        raise HookError(
            f"capture_time_hooks has {len(hooks)} entries for {len(callables)} callables"
        )
    unknown = sorted({key for entry in hooks for key in entry} - set(CAPTURE_TIME_KEYS))
    if unknown:
        raise HookError(
            f"capture_time_hooks has unknown keys {', '.join(unknown)}: use "
            f"{', '.join(CAPTURE_TIME_KEYS)}"
        )


def _megatron_tracker() -> Any:
    """Return Megatron's RNG tracker if Megatron is in use (megatron-core 0.19.2), else None."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    return None if module is None else module.get_cuda_rng_tracker()
