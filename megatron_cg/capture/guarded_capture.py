"""Captures as a transaction: validates, changes, runs the backend, and gives every graph a guard.

A unit has one graph, which replays in every microbatch: without pipeline parallelism, the backward
pass of a microbatch comes before the forward pass of the next (megatron-core 0.19.2,
``TECudaGraphHelper._get_cuda_graph_input_data``).

Note [Two errors]
    CUDA refuses a read on the host, such as ``.item()``, in the call itself, so its error is raised
    in the model's own frame. Ending the capture then raises a second error, which the caller gets
    (torch 2.11, ``torch.cuda.graph``). Python keeps the first one as its context.

Note [An old graph of autograd keeps its streams]
    A parameter keeps its AccumulateGrad node as long as anything refers to the node, which belongs
    to the stream on which it was created. If a training loop still holds the last step's loss, it
    also holds that step's autograd graph. A backward pass under capture then makes its stream wait,
    and the capture fails: "operation would make the legacy stream depend on a capturing blocking
    stream". torch creates a new node after a parameter's data has had another dtype (torch 2.11,
    ``VariableHooks::set_data``: "resets gradient accumulator if metadata is out of date").

Note [A captured graph of autograd keeps its stream]
    Nodes of the capture must not outlive it either. Megatron's layers keep tensors of their last
    forward pass (megatron-core 0.19.2: ``probs`` of the token dispatcher), and these keep the nodes
    of weights in front of them. In a replay, such a weight's gradient is stored, and its hook runs,
    on the capture stream, while whoever reduces gradients waits only for the stream of the last
    hook. With ZeRO-2 a bucket was reduced while gradients were still being copied into it, and some
    were NaN. So nodes are forgotten after a capture as well.

Note [Two stacks]
    Some changes must always be undone: cleared hooks, raw parameters on the modules, RNG and FP8
    state advanced by synthetic inputs, TE's flags. Their stack is unwound before the transaction
    ends. Lasting changes (the graphs, the replay instead of the forward) are on a second stack. It
    is unwound if anything raises. Otherwise the session keeps it until it ends.

Note [Order of entering]
    Raw parameters are entered before the parameters' hooks, because the hooks are on the raw
    parameters. The backend's state is entered after all hooks, so it is restored while they are
    still off: restoring RNG and FP8 state runs no module code, but a hook that fires on it would.

Note [Compiled for a size]
    Dynamo compiles a function for the sizes of its first call, and at the first other size once
    more for any. The two kernels may sum in another order. If a capture has another size than all
    steps (FP8 pads the rows of experts, whose activation megatron-core 0.19.2 compiles), eager
    passes after it would run by the second kernel. So a capture compiles for its own size.

Relied on: every text of CUDA's errors 900 to 908 (``cudaErrorStreamCapture*``) and of torch's own
checks ("during CUDA graph capture") has "captur" in it. Python code of other packages (Triton, TE)
raises them as a RuntimeError with that text.
"""

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_cg.backends.base import Backend, CaptureRequest
from megatron_cg.backends.calls import Place, place_of
from megatron_cg.capture.observer import PassObserver, frozen_kept
from megatron_cg.errors import CaptureError, MegatronCGError
from megatron_cg.fsdp.roles import HookOrder, UnitHooks
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.hooks import HookSnapshot, module_hooks
from megatron_cg.replay.borders import laid_out, spec_of
from megatron_cg.replay.guard import Guard, Hooks, Inputs, autocast_of
from megatron_cg.replay.guarded_graph import GuardedGraph, InFlight, ReplayFunction
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.unit import Unit, moe_metrics
from megatron_cg.restore import Restores, values_kept
from megatron_cg.upstream.patch import Undo, combined_undo, set_attribute, undone_after

if TYPE_CHECKING:
    from megatron_cg.units.unsharded import OtherLeaves

logger = logging.getLogger(__name__)
_DATA: Any = torch.Tensor.data

_REASON = (
    "A graph holds kernels and no host code: what reads or waits for the GPU (.item(), .cpu(), a "
    "condition on a tensor, printing one) cannot be in it, nor can a copy from memory that is not "
    "pinned or a kernel that is compiled or loaded at its first call."
)
_NOT_REGISTERED = "CUDA generator not in capture mode"
"""torch's error for a draw from a generator that is not registered with the graph."""
_OF_GENERATOR = (
    "It draws from a torch.Generator that the graph does not know. Keep it as an attribute of a "
    "captured module, or as a state of Megatron's RNG tracker, or draw from the device's own "
    "generator. Or:"
)
_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
"""torch's error for that: samples are leaves."""


def compiled_kept() -> AbstractContextManager[None]:
    """Functions run by the same compiled code before and after; see Note [Compiled for a size]."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo.config.patch(automatic_dynamic_shapes=False) if dynamo else nullcontext()


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """No parameter has a gradient or a hook; what a backward pass leaves on them is removed."""
    with Restores() as stack:
        for parameter in parameters:
            stack.restore("a gradient", setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        stack.callback(HookSnapshot(*parameters).clear())
        yield


class GuardedCapture:
    """One capture of given units; to be created while their hooks are still installed."""

    def __init__(
        self,
        sharding: Sharding,
        units: Sequence[Unit],
        backend: Backend,
        mismatches: MismatchPolicy,
    ) -> None:
        self._sharding, self._units, self._backend = sharding, tuple(units), backend
        self._mismatches = mismatches
        self._layers = [unit.layer for unit in self._units]
        self._hooks = tuple(Hooks(u.layer, u.graphed, sharding.hoists_hook) for u in self._units)
        self._unit_hooks: tuple[UnitHooks, ...] = ()
        self._observers: tuple[PassObserver, ...] = ()
        self._leaves: OtherLeaves | None = None

    @contextmanager
    def transaction(self) -> Iterator[ExitStack]:
        """A context in which :meth:`run` can be called, and then :meth:`attach`.

        Yields the stack of lasting changes; see Note [Two stacks].

        Raises HookError or UnknownFsdpHookError before anything has been changed.
        """
        layers, sharding = self._layers, self._sharding
        self._unit_hooks = tuple(map(sharding.unit_hooks, self._units))
        with Restores() as lasting, Restores() as always:
            lasting.callback(sharding.stable_memory(layers))
            always.enter_context(sharding.capturing(layers))
            always.enter_context(self._undone(layers))
            always.enter_context(compiled_kept())
            for layer in layers:
                lasting.callback(set_attribute(layer, "cuda_graphs", [], shared=True))
            yield lasting

    @contextmanager
    def _undone(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Undo what passes of ``layers`` change, which run without hooks and gradients."""
        owns_hook = self._sharding.owns_hook
        modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        parameters = dict.fromkeys(p for module in modules for p in module.parameters(False))
        with Restores() as stack:
            stack.enter_context(without_gradients(list(parameters)))
            for module in modules:  # Synthetic inputs change some (a router's token counts).
                buffers = {name: one for name, one in module._buffers.items() if one is not None}
                label = f"of a {type(module).__name__}"
                named = [(f"buffer {name} {label}", one) for name, one in buffers.items()]
                stack.enter_context(values_kept(named))
                stack.restore(f"buffers {label}", module._buffers.update, buffers)
            metrics = moe_metrics().items()  # Those of the steps since they were logged.
            stack.enter_context(values_kept((name, one.values) for name, one in metrics))
            # Of all modules: TE installs hooks on each during warmup, and leaves them if it fails.
            stack.callback(HookSnapshot(*modules).restore)
            for module in modules:
                if module in layers or any(owns_hook(hook.fn) for hook in module_hooks(module)):
                    HookSnapshot(module).clear()
            stack.enter_context(self._backend.preserved(layers))
            yield

    def attach(self, lasting: ExitStack) -> None:
        """Let the units replay, with their hooks around each replay."""
        for unit, hooks in zip(self._units, self._unit_hooks, strict=True):
            lasting.callback(unit.attach(hooks.before_replay))

    def run(
        self, request: CaptureRequest, *, begin: Callable[[], None], run_remaining_hooks: bool
    ) -> tuple[GuardedGraph, ...]:
        """Capture as :meth:`megatron_cg.capture.session.Session.capture` says.

        ``begin`` is called when all is ready and before the first hook runs, and may raise.
        """
        request.names = [unit.name for unit in self._units]
        request.hooks = [hooks.capture_time for hooks in self._unit_hooks]
        order = HookOrder(request, begun=self._pass_begun, ended=self._pass_ended)
        request.hooks = order.wrapped
        watched = self._sharding.watched_memory
        self._observers = tuple(
            PassObserver(unit, own, named, watched(unit.layer, unit.graphed))
            for unit, own, named in zip(self._units, request.args, request.kwargs, strict=True)
        )
        graphed = [module for unit in self._units for module in unit.graphed]
        self._leaves = self._sharding.other_leaves(self._layers)
        if self._leaves is None:
            forget_accumulators(graphed)
        begin()
        try:
            graphs = self._capture(order, request)
        except Exception as error:
            refused = self._refusal(error, order)
            if run_remaining_hooks:
                # The frames hold incomplete graphs, and the hooks may need their memory.
                clear_frames(error)
                order.run_rest()
            if refused is None:
                raise
            raise refused from error
        finally:
            if self._leaves is None:
                forget_accumulators(graphed)
        return self._guarded_graphs(graphs, request)

    def _capture(self, order: HookOrder, request: CaptureRequest) -> Sequence[Any]:
        with (
            self._leaves.held() if self._leaves is not None else nullcontext(),
            # It reads on the host. At a replay, autograd looks at what the graph returns.
            torch.autograd.set_detect_anomaly(False),
            undone_after(self._other_parameters_refused(order)),
        ):
            try:
                graphs = self._backend.capture(request)
            finally:
                torch.clear_autocast_cache()
                for observer in self._observers:
                    observer.stop()
                with Restores() as undo:
                    for observer in self._observers:
                        if observer.code is not None:
                            undo.callback(observer.code.restore)
        if self._leaves is not None:
            for graph in graphs:
                self._leaves.replays(self._backend.replay_function(graph))
        order.check_finished()
        return graphs

    @combined_undo
    def _other_parameters_refused(self, order: HookOrder) -> Iterator[Undo]:
        """Refuse a unit whose backward pass reaches a parameter of a module outside of it.

        A graph returns gradients of its unit's own parameters. Those of others would be lost.
        """
        own = [set(unit.layer.parameters()) for unit in self._units]

        def look(parameter: nn.Parameter, name: str, _gradient: torch.Tensor) -> None:
            now = order.under_way
            if now is not None and parameter not in own[now[0]]:
                raise CaptureError(
                    f"{self._units[now[0]].name} uses {name}, a parameter of a module outside of "
                    "it. A graph returns no gradient for it. Pass the values as an input, make the "
                    "parameter an attribute of the unit too, or leave the unit out of the graphs."
                )

        for name, parameter in self._sharding.wrapped.named_parameters():
            if parameter.requires_grad:
                yield parameter.register_hook(partial(look, parameter, name)).remove

    def _pass_begun(self, index: int, forward: bool, warmup: bool) -> None:
        torch.clear_autocast_cache()  # No graph may read the casts of another pass.
        self._observers[index].begun(forward=forward, warmup=warmup)

    def _pass_ended(self, index: int, forward: bool, _warmup: bool) -> None:
        self._observers[index].ended(forward=forward)

    def _refusal(self, error: Exception, order: HookOrder) -> CaptureError | None:
        """What CUDA refused, by module and line; None for any other error.

        Never raises, although the advice comes from Megatron's code: the hooks that other ranks
        wait for must still run.
        """
        if order.under_way is None:
            return None
        index, in_backward = order.under_way
        try:
            return refusal(error, self._units[index], in_backward)
        except Exception:
            logger.exception("megatron_cg: the place of a failed capture could not be found")
            return None

    def _guarded_graphs(
        self, graphs: Sequence[Any], request: CaptureRequest
    ) -> tuple[GuardedGraph, ...]:
        in_flight, made = InFlight(), list[GuardedGraph]()
        for index, (unit, graph) in enumerate(zip(self._units, graphs, strict=True)):
            observer, replay = self._observers[index], self._backend.replay_function(graph)
            args, kwargs = request.args[index], request.kwargs[index]
            asks, one = observer.asks_for_gradients, unit.any_stride_of_one
            samples = (args, kwargs, observer.labels)
            inputs = Inputs(*samples, same_gradients=asks, any_stride_of_one=one)
            made.append(
                GuardedGraph(
                    graph,
                    self._guard(index, inputs, args[0].device.type, request.options),
                    unit,
                    self._mismatches,
                    replay,
                    index=index,
                    in_flight=in_flight,
                    kept=partial(self._kept, unit, observer, replay),
                    prepare_backward=partial(self._sharding.prepare_backward, unit.layer),
                    collectives=observer.collectives,
                    one_node=self._sharding.counts_gradients and sum(replay.needs) > 1,
                )
            )
        return tuple(made)

    def _guard(
        self, index: int, inputs: Inputs, device_type: str, options: Mapping[str, Any]
    ) -> Guard:
        unit, observer = self._units[index], self._observers[index]
        read, key_sets = observer.rows()
        with unit.in_backward():
            in_backward = autocast_of(device_type)
        with unit.in_forward():
            return Guard(
                inputs,
                observer.addresses,
                objects=[*read, *unit.entries(), *self._backend.entries(unit.graphed)],
                key_sets=key_sets,
                hooks=self._hooks[index],
                captured_numerics=self._backend.captured_numerics(index, options),
                numerics=self._backend.numerics,
                device_type=device_type,
                autocast=in_backward,
            )

    @contextmanager
    def _kept(self, unit: Unit, observer: PassObserver, replay: ReplayFunction) -> Iterator[None]:
        layers, leaves = [unit.layer], self._leaves
        with Restores() as stack:
            stack.enter_context(self._sharding.states_kept(unit.layer.modules()))
            stack.enter_context(frozen_kept(unit.graphed))
            stack.enter_context(unit.kept())
            if observer.code is not None:
                stack.enter_context(observer.code.kept())
            if leaves is None and (leaves := self._sharding.other_leaves(layers)) is not None:
                stack.callback(leaves.replays(replay))
            if leaves is not None:
                stack.enter_context(leaves.held(captures=False))
            # Hooks of Megatron-FSDP may end a backward pass of the whole model.
            stack.enter_context(self._undone(layers))
            stack.enter_context(self._backend.without_updates())
            yield


def refusal(error: BaseException, unit: Unit, in_backward: bool) -> CaptureError | None:
    """An error that says what CUDA refused in the capture of ``unit``; None for other errors.

    If another error ended the capture first, such as out of memory, CUDA refused only what
    followed. The returned error then reports that first error, which ``error`` itself would hide.
    The frames of ``error`` must not be cleared yet.
    """
    errors = list(chain(error))
    if any(_LEAF in str(one) for one in errors):
        return unit.refused(
            "writes into an argument that needs a gradient, but a graph would write into its own "
            "copy",
            "Return the new values instead, or write into a clone.",
        )
    if isinstance(error, MegatronCGError) or not any(map(_is_refusal, errors)):
        return None
    first, place = _first(errors, unit.layer)
    where = f"the {'backward' if in_backward else 'forward'} pass of {unit.name}"
    module: nn.Module | None = None
    if place is not None:
        module = place.module
        # A unit's backward pass has no module, so only its line is known.
        said = place.source if module is None else str(place)
        where += f", in {said}" if said else ""
    text = str(first).partition("\n")[0]
    if not _is_refusal(first):
        return CaptureError(f"Capture of {where} failed ({type(first).__name__}: {text}).")
    reason = _OF_GENERATOR if _NOT_REGISTERED in text else _REASON
    return CaptureError(
        f"CUDA cannot capture {where} ({type(first).__name__}: {text}). {reason} "
        f"{unit.leave_out(module)}"
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, its cause or context, and so on back to the first error."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def clear_frames(error: BaseException) -> None:
    """Release what the frames of ``error`` and of its chain hold, such as incomplete graphs.

    Read the places of the errors before this call.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def _is_refusal(error: BaseException) -> bool:
    # Any other class is an error of the model, whatever its text says.
    package = type(error).__module__.partition(".")[0]
    made_for_it = isinstance(error, RuntimeError) and package in ("builtins", "torch")
    return made_for_it and "captur" in str(error)


def _first(errors: Sequence[BaseException], root: nn.Module) -> tuple[BaseException, Place | None]:
    """The error that ended the capture.

    The first refusal in a module's code, else the first error there, else the first of all.
    """
    frames = [(error, list(traceback.walk_tb(error.__traceback__))) for error in errors[::-1]]
    placed = [(error, place_of(reversed(found), root)) for error, found in frames]
    return max(placed, key=lambda one: (one[1] is not None, _is_refusal(one[0])))


def forget_accumulators(modules: Iterable[nn.Module]) -> None:
    """Make the next pass create new AccumulateGrad nodes; see the two notes on streams above.

    ``modules`` stand for all parameters below them, which keep their data, gradients and hooks.
    Hooks on the nodes themselves are lost.
    """
    for parameter in {p: None for module in modules for p in module.parameters()}:
        # torch's own property: Transformer Engine's quantized tensors have one of their own.
        data = _DATA.__get__(parameter)
        other = torch.float64 if data.dtype == torch.float32 else torch.float32
        empty = torch.empty(0, dtype=other, device=data.device)
        _DATA.__set__(parameter, laid_out(empty, spec_of(parameter)))
        _DATA.__set__(parameter, data)
