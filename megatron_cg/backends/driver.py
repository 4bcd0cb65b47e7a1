"""One capture: warmup, recording of all passes in order, the life of every result, and replays.

The contract is that of ``make_graphed_callables`` in transformer-engine 2.20.2
(``transformer_engine/pytorch/graph.py``) for one microbatch: the same warmup, then all forward
passes and then all backward passes in reverse. Hooks run outside of the recording.
``torch.autograd.backward`` collects gradients, with ``.grad`` removed before.

Note [How long a result lives]
    Passes that are recorded later may use the memory of what was released. Gradients of parameters
    are released after their own backward pass, since replays return copies of them. If buffers are
    shared, outputs are released then too, and gradients of inputs before the backward pass after
    the next one. Otherwise both live as long as the graph. What no caller reads, such as
    activations, is released by Python itself.

Note [Gradients of one output]
    A backward graph computes the gradients of all outputs together. If a step does not use an
    output, autograd leaves what only that output depends on without a gradient, and an optimizer
    does not touch such a parameter. So the first warmup finds what each output depends on, by one
    more forward and backward pass for each output. It does that between the hooks of the forward
    pass, where the parameters are there.

Note [References that cannot be copied]
    torch's own weak reference holds one reference count of the storage, as a plain number. A copy
    of it by ``copy.deepcopy`` releases the same count a second time, and the process crashes later.
    Relied on: torch 2.11, ``torch.multiprocessing.reductions.StorageWeakRef`` and
    ``torch.UntypedStorage._new_with_weak_ptr``, which returns None once the last owner is gone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.errors import LEAVE_OUT, CaptureError, HookError, MegatronCGError, say
from megatron_cg.replay.borders import laid_out, local, same_placements, spec_of
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.upstream.patch import set_attribute
from megatron_cg.upstream.symbols import Symbol

Tensors = tuple[torch.Tensor | None, ...]
_STORAGE = Symbol(
    "torch._C:_construct_storage_from_data_pointer", "a storage that does not own its memory"
)
RELIES_ON = (_STORAGE,)


class Recording:
    """One recorded forward or backward pass."""

    def replay(self) -> None:
        """Run the pass again, on the memory on which it was recorded."""
        raise NotImplementedError

    def finished(self, *, lends: bool) -> None:
        """The caller has taken the results of a replay.

        ``lends``: it reads gradients of weights in place until the next replay of any pass.
        """

    def reset(self) -> None:
        """Release the recording. Safe to call twice."""
        raise NotImplementedError


@dataclass
class Recorded:
    """All that capture records for one sample of one callable.

    ``inputs`` is the static input surface: the flattened sample arguments, the keyword samples
    in the order of ``kwarg_names``, then the module's parameters that receive a gradient.
    ``outputs``, ``grad_outputs`` and ``grad_inputs`` are flat and are in static memory.
    """

    module: nn.Module
    label: str
    user_args: int
    kwarg_names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    parameters: tuple[nn.Parameter, ...]
    forward: Recording | None = None
    backward: Recording | None = None
    outputs: Tensors = ()
    output_spec: TreeSpec = field(default_factory=lambda: tree_flatten(None)[1])
    grad_outputs: Tensors = ()
    grad_inputs: Tensors = ()
    layouts: dict[int, Any] = field(default_factory=dict)
    """For each of ``inputs`` that is a DTensor, by its id: how its gradient is laid out."""
    reached: dict[int, set[int]] = field(default_factory=dict)
    """By output, if several need a gradient: the ids of ``inputs`` that it gives one to."""
    gradients_borrowed: bool = False
    """Whether gradients of parameters are returned in static memory, without a copy."""


class GraphResetError(MegatronCGError):
    """A graphed callable was used after its ``reset()``."""


class _Replay(torch.autograd.Function):
    """Autograd's view of a recorded callable: inputs and parameters in, outputs out."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, *inputs: torch.Tensor) -> Any:
        forward, _ = _live_passes(recorded)
        user = recorded.user_args
        _copy_together(zip(recorded.inputs[:user], inputs[:user], strict=True))
        forward.replay()
        forward.finished(lends=False)
        ctx.recorded = recorded
        ctx.set_materialize_grads(False)
        return tuple(None if output is None else output.detach() for output in recorded.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        recorded: Recorded = ctx.recorded
        _, backward = _live_passes(recorded)
        pairs = [(s, g) for s, g in zip(recorded.grad_outputs, grads, strict=True) if s is not None]
        _copy_together((s, g) for s, g in pairs if g is not None)
        for static in (s for s, g in pairs if g is None):
            static.zero_()
        backward.replay()
        gradients = _reached(recorded, grads)
        clones = len(gradients) if recorded.gradients_borrowed else recorded.user_args
        returned = tuple(
            None if grad is None else grad.clone() if index >= clones else grad.detach()
            for index, grad in enumerate(gradients)
        )
        backward.finished(lends=recorded.gradients_borrowed)
        layouts = (recorded.layouts.get(id(one)) for one in recorded.inputs)
        return (None, *map(laid_out, returned, layouts))


def _copy_together(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each value into its static tensor, unless it is there, in one call a dtype.

    ``torch._foreach_copy_`` copies tensors of one dtype and device by one kernel, and others one by
    one (torch 2.11, ``ForeachUtils.h``, ``can_use_fast_route``). No value lies in the static memory
    of another one; see ``replay/guard.py``.
    """
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for static, value in pairs:
        if not _lies_in(value, static):
            into, values = groups.setdefault((static.dtype, static.device), ([], []))
            into.append(static)
            # Another layout of the same memory cannot be copied onto itself.
            values.append(value.clone() if value.data_ptr() == static.data_ptr() else value)
    for into, values in groups.values():
        torch._foreach_copy_(into, values)


def _lies_in(value: torch.Tensor, static: torch.Tensor) -> bool:
    return (
        value.data_ptr() == static.data_ptr()
        and value.stride() == static.stride()
        and value.is_conj() == static.is_conj()
        and value.is_neg() == static.is_neg()
    )


def _reached(recorded: Recorded, grads: Sequence[torch.Tensor | None]) -> Tensors:
    """Those of inputs that outputs with a gradient reach; see Note [Gradients of one output]."""
    if all(grads[number] is not None for number in recorded.reached):
        return recorded.grad_inputs
    used = (keys for number, keys in recorded.reached.items() if grads[number] is not None)
    reached = set().union(*used)
    pairs = zip(recorded.inputs, recorded.grad_inputs, strict=True)
    return tuple(grad if id(one) in reached else None for one, grad in pairs)


def _without_gradient(recorded: Recorded, inputs: Sequence[Any]) -> list[int]:
    """The outputs that depend on nothing that needs a gradient now; all did at capture."""
    if not recorded.reached:
        return []
    given = zip(recorded.inputs, (*inputs, *recorded.parameters), strict=True)
    needing = {id(static) for static, value in given if value.requires_grad}
    return [n for n, keys in recorded.reached.items() if keys and keys.isdisjoint(needing)]


def _live_passes(recorded: Recorded) -> tuple[Recording, Recording]:
    if recorded.forward is None or recorded.backward is None:
        raise GraphResetError(
            f"{recorded.label}: this graphed callable has been reset and can no longer be used. "
            "Capture again."
        )
    return recorded.forward, recorded.backward


class GraphedModule:
    """A layer's recorded passes; called like the layer, with tensors as in its sample."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._function: Any = _Replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. Keywords that were not in the sample are ignored, as in TE.

        Raises GraphResetError after reset.
        """
        recorded = self._recorded
        _live_passes(recorded)
        flat, _ = tree_flatten((args, [kwargs[name] for name in recorded.kwarg_names]))
        outputs = list(self._function.apply(recorded, *flat, *recorded.parameters))
        for number in _without_gradient(recorded, flat):
            outputs[number] = outputs[number].detach()
        return tree_unflatten(outputs, recorded.output_spec)

    def replay_function(self) -> ReplayFunction:
        recorded = self._recorded
        return ReplayFunction(
            self._function,
            1 + recorded.user_args,
            replace=lambda function: set_attribute(self, "_function", function),
            borrow=lambda: set_attribute(recorded, "gradients_borrowed", True),
            needs=tuple(static is not None for static in recorded.grad_outputs),
        )

    def backward_dw(self) -> None:
        """Do nothing: the backward pass holds the weight gradients. Raises after reset."""
        _live_passes(self._recorded)

    def reset(self) -> None:
        """Release both passes; a later call or a pending backward then raises."""
        recorded = self._recorded
        passes = (recorded.forward, recorded.backward)
        recorded.forward = recorded.backward = None
        recorded.inputs = recorded.outputs = ()
        recorded.parameters = ()
        recorded.grad_outputs = recorded.grad_inputs = ()
        for one in filter(None, passes):
            one.reset()


#: Options of make_graphed_callables that ask for FP8, and those without effect without FP8.
_FP8_OPTIONS = ("enabled", "fp8_enabled", "calibrating", "fp8_calibrating")
_IDLE_OPTIONS = frozenset(
    {*_FP8_OPTIONS, "recipe", "fp8_recipe", "amax_reduction_group", "fp8_group"}
    | {"cache_quantized_params", "fp8_weight_caching", "allow_unused_input"}
)


class Recorder:
    """Records the passes of one capture, one at a time, in one pool of memory."""

    def warming_up(self) -> AbstractContextManager[None]:
        """A block in which all passes and capture-time hooks of the warmup run."""
        return nullcontext()

    def recording(self, module: nn.Module, label: str) -> AbstractContextManager[Recording]:
        """A block whose work is recorded; ``label`` names the pass of ``module`` in messages."""
        raise NotImplementedError

    def release(self, results: Tensors) -> Tensors:
        """Let passes that are recorded from now on use the memory of ``results``.

        Returns tensors for replays, on the same memory.
        """
        raise NotImplementedError

    def settle(self, samples: Sequence[Recorded]) -> None:
        """Every pass is recorded; ``samples`` are in the order of their backward passes."""

    def abandon(self) -> None:
        """The capture failed: release all recordings and the pool. Raises nothing of its own."""


def capture_modules(
    backend: str, make_recorder: Callable[[], Recorder], request: CaptureRequest
) -> tuple[GraphedModule, ...]:
    """Warm callables up and record them; see :class:`megatron_cg.backends.base.Backend`.

    ``backend`` is the name of the backend in messages. ``make_recorder`` is called when everything
    is checked, before anything runs.

    Raises CaptureError, HookError if a buffer needs a gradient, and HostSyncError if a callable
    reads a tensor on the host, and the recorder sees it.
    """
    _check(backend, request)
    run = _Capture(request)
    recorder = make_recorder()
    try:
        with recorder.warming_up():
            for iteration in range(request.warmups):
                run.warm_up(iteration)
        run.record(recorder)
    except BaseException:
        recorder.abandon()
        raise
    return tuple(map(GraphedModule, run.recorded))


class _Capture:
    def __init__(self, request: CaptureRequest) -> None:
        self._request = request
        self._grad_outputs: dict[Any, Tensors] = {}
        self.recorded = [
            _surface(module, request.label(index), request.args[index], request.kwargs[index])
            for index, module in enumerate(request.callables)
        ]
        for kind in {t.device.type for item in self.recorded for t in item.inputs}:
            if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
                raise CaptureError(
                    "the capture runs under torch.autocast with its cache, and a graph would keep "
                    "the cached casts of weights. Pass cache_enabled=False to torch.autocast."
                )

    def warm_up(self, iteration: int) -> None:
        """Run every pass once, in order, recording nothing."""
        alive: list[list[Any]] = []
        for index in range(len(self.recorded)):
            self._run_hooks(index, "forward_pre_hooks")
            outputs, _ = self._call(index)
            if iteration == 0 and self._find_reached(index, outputs):
                # Those passes may have written what this one saved for its backward.
                outputs, _ = self._call(index)
            self._run_hooks(index, "forward_hooks")
            alive.append(outputs)
        for index in reversed(range(len(self.recorded))):
            needing = tuple(o for o in alive.pop() if o is not None and o.requires_grad)
            made_up = tuple(torch.zeros_like(output) for output in needing)
            self._run_hooks(index, "backward_pre_hooks")
            gradients = self._gradients(index, needing, made_up, retain_graph=False)
            self._run_hooks(index, "backward_hooks")
            self._keep_used_parameters(index, gradients, iteration)

    def _find_reached(self, index: int, outputs: Sequence[Any]) -> bool:
        """See Note [Gradients of one output]. Returns whether more passes were needed."""
        item = self.recorded[index]
        numbers = [n for n, o in enumerate(outputs) if o is not None and o.requires_grad]
        if len(numbers) < 2:
            return False
        needing = [id(tensor) for tensor in item.inputs if tensor.requires_grad]
        for number in numbers:
            output = self._call(index)[0][number]
            gradients = self._gradients(index, (output,), (torch.zeros_like(output),), False)
            pairs = zip(needing, gradients, strict=True)
            item.reached[number] = {key for key, gradient in pairs if gradient is not None}
        return True

    def record(self, recorder: Recorder) -> None:
        for index, item in enumerate(self.recorded):
            self._run_hooks(index, "forward_pre_hooks")
            with recorder.recording(item.module, f"forward of {item.label}") as item.forward:
                flat, item.output_spec = self._call(index)
            self._run_hooks(index, "forward_hooks")
            item.outputs = tuple(flat)
        ended: list[Recorded] = []
        for index in reversed(range(len(self.recorded))):
            if self._request.share_buffers and len(ended) >= 2:
                of_inputs, of_parameters = parts(ended[-2])
                ended[-2].grad_inputs = (*recorder.release(of_inputs), *of_parameters)
            self._record_backward(index, recorder)
            ended.append(self.recorded[index])
        recorder.settle(ended)

    def _call(self, index: int) -> tuple[list[Any], TreeSpec]:
        item, request = self.recorded[index], self._request
        flat, spec = tree_flatten(item.module(*request.args[index], **request.kwargs[index]))
        _check_outputs(item.label, flat)
        return flat, spec

    def _run_hooks(self, index: int, key: str) -> None:
        item = self.recorded[index]
        for hook in self._request.hooks[index].get(key, {}).values():
            hook(item.module)

    def _record_backward(self, index: int, recorder: Recorder) -> None:
        item = self.recorded[index]
        item.grad_outputs = self._static_grad_outputs(item)
        outputs = tuple(o for o in item.outputs if o is not None and o.requires_grad)
        grads = tuple(grad for grad in item.grad_outputs if grad is not None)
        self._run_hooks(index, "backward_pre_hooks")
        with recorder.recording(item.module, f"backward of {item.label}") as item.backward:
            gradients = iter(self._gradients(index, outputs, grads, self._request.retain_graph))
        self._run_hooks(index, "backward_hooks")
        item.grad_inputs = tuple(
            next(gradients) if tensor.requires_grad else None for tensor in item.inputs
        )
        # Detached, so that nothing keeps autograd's nodes, which belong to the capture's stream.
        item.outputs = tuple(None if o is None else o.detach() for o in item.outputs)
        of_inputs, of_parameters = parts(item)  # See Note [How long a result lives].
        item.grad_inputs = (*of_inputs, *recorder.release(of_parameters))
        if self._request.share_buffers:
            item.outputs = recorder.release(item.outputs)

    def _static_grad_outputs(self, item: Recorded) -> Tensors:
        """Return memory for incoming gradients; equal signatures share it if buffers are shared."""
        likes = [o if o is not None and o.requires_grad else None for o in item.outputs]
        key = tuple(o if o is None else (o.shape, o.dtype) for o in likes)
        if not self._request.share_buffers or key not in self._grad_outputs:
            self._grad_outputs[key] = tuple(o if o is None else torch.empty_like(o) for o in likes)
        return self._grad_outputs[key]

    def _gradients(
        self,
        index: int,
        outputs: tuple[torch.Tensor, ...],
        grads: tuple[torch.Tensor, ...],
        retain_graph: bool,
    ) -> Tensors:
        inputs = [t for t in self.recorded[index].inputs if t.requires_grad]
        before = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        try:
            torch.autograd.backward(outputs, grad_tensors=grads, retain_graph=retain_graph)
            made = tuple(tensor.grad for tensor in inputs)
            _check_gradients(self.recorded[index], made)
            return tuple(map(local, made))  # In the recording, which then waits for them.
        finally:
            for tensor, grad in zip(inputs, before, strict=True):
                tensor.grad = grad

    def _keep_used_parameters(self, index: int, grads: Tensors, iteration: int) -> None:
        """Drop parameters that got no gradient, so that none of their hooks fires at a replay."""
        item = self.recorded[index]
        by_input = dict(zip((id(t) for t in item.inputs if t.requires_grad), grads, strict=True))
        user = item.inputs[: item.user_args]
        used = tuple(p for p in item.parameters if by_input.get(id(p)) is not None)
        if len(used) != len(item.parameters):
            if iteration:
                raise CaptureError(f"{item.label}: which parameters get gradients has changed")
            item.parameters, item.inputs = used, (*user, *used)


def parts(item: Recorded) -> tuple[Any, Any]:
    return item.grad_inputs[: item.user_args], item.grad_inputs[item.user_args :]


def _surface(
    module: nn.Module, label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Recorded:
    """Return the static input surface of one sample, with nothing recorded yet."""
    flat, _ = tree_flatten((args, list(kwargs.values())))
    for value in flat:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"the samples of {label} hold a {type(value).__name__}; a graph takes only tensors"
            )
    parameters = tuple(module.parameters())
    return Recorded(module, label, len(flat), tuple(kwargs), (*flat, *parameters), parameters)


def _check(backend: str, request: CaptureRequest) -> None:
    """Raise for an option that is unknown or FP8's or a module in evaluation (CaptureError).

    Or for a trainable buffer (HookError).
    """
    unknown = sorted(set(request.options) - _IDLE_OPTIONS)
    if unknown:
        raise CaptureError(
            f"the backend {backend} knows no option {', '.join(unknown)} of "
            "make_graphed_callables: leave it out"
        )
    for name in _FP8_OPTIONS:
        asked = request.options.get(name)
        if any(asked) if isinstance(asked, tuple) else asked:
            raise CaptureError(
                f"{name} is set: the backend {backend} has no FP8. To mend this, "
                + say("{drop:--fp8-format}, or type {flag:--cg-backend te}.")
            )
    for index, module in enumerate(request.callables):
        label = request.label(index)
        if not module.training:
            raise CaptureError(f"{label} is in evaluation: call .train() before capture")
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise HookError(
                f"{label} has a buffer that requires a gradient: only parameters may be "
                "trainable. Make it a parameter."
            )


def _check_outputs(label: str, outputs: Sequence[Any]) -> None:
    """Raise CaptureError if the callable ``label`` returns anything but dense tensors and None."""
    for output in outputs:
        if output is None or (isinstance(output, torch.Tensor) and is_dense(output)):
            continue
        kind = type(output).__name__
        if isinstance(output, torch.Tensor):
            kind = f"tensor that is not dense ({output.layout})"
        raise CaptureError(
            f"{label} returned a {kind}; a graph returns only dense tensors. {say(LEAVE_OUT)}."
        )


def _check_gradients(item: Recorded, gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise CaptureError for a sparse gradient, whose number of values is up to the inputs.

    Or for one of a DTensor that was laid out otherwise before.
    """
    names = {id(parameter): name for name, parameter in item.module.named_parameters()}
    needing = (tensor for tensor in item.inputs if tensor.requires_grad)
    for tensor, gradient in zip(needing, gradients, strict=True):
        spec = spec_of(gradient)
        if spec and not same_placements(before := item.layouts.setdefault(id(tensor), spec), spec):
            raise CaptureError(
                f"{item.label}: the gradient of {names[id(tensor)]} is laid out as "
                f"{before.placements} or {spec.placements}, by which outputs get one, and a graph "
                "returns one layout. Return one tensor, or leave the module out of units."
            )
        if gradient is not None and not is_dense(gradient):
            raise CaptureError(
                f"{item.label}: the gradient of {names.get(id(tensor), 'an input')} is sparse, and "
                "a graph returns only dense tensors. Make the module with sparse=False. Or: "
                + say(LEAVE_OUT)
            )


class StorageReference:
    """Refers to ``storage`` without keeping its memory; no other storage gets its ``_cdata``."""

    __slots__ = ("_weak",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it no longer has an owner."""
        return torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)

    def expired(self) -> bool:
        return bool(self._weak.expired())

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "a reference to the memory of a CUDA graph, or of a tape, cannot be copied or pickled. "
            "Copy the module before the capture, or close the graphs first."
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the values of ``tensor`` lie in one block of memory, by its strides."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def without_owners(
    tensors: Iterable[torch.Tensor | None], is_in_pool: Callable[[torch.UntypedStorage], bool]
) -> tuple[torch.Tensor | None, ...]:
    """Tensors on the same memory, each with a storage of its own that does not keep the memory.

    One whose storage is elsewhere stays. So does one of a subclass, or a lazy conjugate: its memory
    does not tell the values.
    """

    def without_owner(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        if not is_in_pool(storage):
            return tensor
        same = _STORAGE.find()(storage.data_ptr(), tensor.device, storage.nbytes())
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(same, tensor.storage_offset(), tensor.size(), tensor.stride())

    return tuple(None if tensor is None else without_owner(tensor) for tensor in tensors)
