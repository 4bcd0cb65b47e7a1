"""CUDA graphs by Transformer Engine.

Note [The function that replays]
    In TE's ``graph.py`` the function that is returned for each sample calls ``graphed``. That
    applies the class ``Graphed`` to three arguments of its own, ``len_user_args`` arguments of the
    caller, and the weights. ``Graphed.backward`` copies incoming gradients into
    ``static_grad_outputs``, and returns copies of the gradients that
    ``returned_param_grad_clone_slots`` names. All these are closure variables of each sample.
"""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.base import Backend, CaptureRequest, leave_pool, stream_kept, waited_for
from megatron_cg.errors import CaptureError
from megatron_cg.replay.guard import Entry
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.restore import Restores
from megatron_cg.upstream.patch import IN_CELL, cells_of, set_attribute, undone_after
from megatron_cg.upstream.symbols import Symbol, changed
from megatron_cg.upstream.te import END_CAPTURING, FP8, GRAPH, IS_CAPTURING

_MAKE = Symbol(
    f"{GRAPH}:make_graphed_callables",
    "TE's capture of modules, which TE 2.19 is the first to do around hooks",
    parameters=("capture_time_hooks",),
)
_AUTOCAST = Symbol(f"{FP8}.get_autocast_state", "a snapshot of what autocast sets")
_SET_AUTOCAST = Symbol(f"{FP8}.set_autocast_state", "what puts such a snapshot back")
_FP8_STATE = Symbol(FP8, "FP8 state of all modules", attributes=("reduce_and_update_fp8_tensors",))
_MODULE = Symbol(
    "transformer_engine.pytorch.module.base:TransformerEngineBaseModule",
    "a module of TE with FP8 state",
    attributes=("fp8_meta", "get_fp8_meta_tensors", "reset_fp8_meta_tensors"),
)
_MAKER = (
    "transformer_engine.pytorch.graph:_make_graphed_callables.<locals>"
    ".make_graphed_autograd_function"
)
_FUNCTION = Symbol(f"{_MAKER}.<locals>.Graphed", "what replays a graph")
_CALLED = Symbol(f"{_MAKER}.<locals>.functionalized", "what applies it")
RELIES_ON = (_MAKE, _AUTOCAST, _SET_AUTOCAST, _FP8_STATE, _MODULE, _FUNCTION, _CALLED)
_NAMES = {
    "sample_kwargs": "kwargs",
    "num_warmup_iters": "warmups",
    "retain_graph_in_backward": "retain_graph",
    "_reuse_graph_input_output_buffers": "share_buffers",
}
"""Of TE's arguments: the field of a request."""
_SCALINGS = ("scaling_fwd", "scaling_bwd")
_OWN_ARGUMENTS = 3
"""TE's own: whether FP8 weights are cast, a stream, and an event."""


class TransformerEngineBackend(Backend):
    """Captures through TE's ``make_graphed_callables`` and cleans up after its failures."""

    name = "transformer_engine"

    def __init__(self) -> None:
        """Raises UpstreamChangedError if this TE has no capture-time hooks."""
        for symbol in (_MAKE, IS_CAPTURING, END_CAPTURING, _AUTOCAST, _SET_AUTOCAST, _FP8_STATE):
            symbol.find()

    def capture(self, request: CaptureRequest) -> tuple[Callable[..., Any], ...]:
        pool = torch.cuda.graph_pool_handle()
        # Here too, since a failed rank runs other hooks before its state is restored.
        with stream_kept(), waited_for():
            try:
                graphs: tuple[Callable[..., Any], ...] = _MAKE.find()(
                    request.callables, request.args, pool=pool, **options_of(request)
                )
            except BaseException:
                leave_pool(pool)
                raise
        self.pool = pool
        return graphs

    @staticmethod
    def replay_function(graph: Any) -> ReplayFunction:
        """See :class:`Backend`. TE returned the graph for a call with an order."""
        applied = _cell(_cell(graph, "graphed").cell_contents, "Graphed")
        function = applied.cell_contents
        clones = _cell(function.backward, "returned_param_grad_clone_slots")
        none = (False,) * len(clones.cell_contents)

        def borrow() -> Callable[[], None]:
            # Called in each backward pass, so it only sets a variable.
            own, clones.cell_contents = clones.cell_contents, none
            return partial(setattr, clones, IN_CELL, own)

        incoming = _cell(function.backward, "static_grad_outputs").cell_contents
        return ReplayFunction(
            function,
            _OWN_ARGUMENTS + _cell(function.forward, "len_user_args").cell_contents,
            replace=lambda replacement: set_attribute(applied, IN_CELL, replacement),
            borrow=borrow,
            needs=tuple(static is not None for static in incoming),
        )

    def captured_numerics(self, index: int, options: Mapping[str, Any]) -> Any:
        """The recipe that Megatron passed to TE; ``enabled`` and ``recipe`` are newer names."""
        enabled = options.get("fp8_enabled", options.get("enabled", False))
        if isinstance(enabled, tuple | list):
            enabled = enabled[index]
        return options.get("fp8_recipe", options.get("recipe")) if enabled else None

    def entries(self, modules: Sequence[nn.Module]) -> Iterator[Entry]:
        """Scales and amax histories of delayed scaling, which graphs read and write in place."""
        for module in _with_delayed_scaling(modules):
            for key in _SCALINGS:
                what, clause = f"{key} of a {type(module).__name__}", "fp8 state"
                yield Entry(module.fp8_meta, key, clause, what)
                for name in ("scale", "amax_history"):
                    yield Entry(vars(module.fp8_meta[key]), name, clause, f"{name} of {what}")

    def without_updates(self) -> AbstractContextManager[None]:
        """The backward pass of the first module under an autocast updates the scales of all.

        Graphs also do this in Python (TE 2.20.2, ``graph.py``, ``Graphed.backward``).
        """
        nothing = staticmethod(lambda *_args, **_kwargs: None)
        update = "reduce_and_update_fp8_tensors"
        return undone_after(set_attribute(_FP8_STATE.find(), update, nothing))

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        """Keep RNG, FP8 scales, TE's capturing flag and patched classes, the stream, and gc.

        TE itself restores the first three when capture succeeds, and nothing when it fails
        (2.20.2: ``make_graphed_callables`` has no ``finally``).
        """
        with Restores() as stack:
            # TE turns it off around each graph, and not on again after an error in one (2.20.2,
            # ``graph.py``, ``_graph_context_wrapper``).
            stack.callback(gc.enable if gc.isenabled() else gc.disable)
            for kind in {type(module) for module in callables}:  # TE leaves its own if it fails
                stack.callback(set_attribute(kind, "__call__", kind.__call__, shared=True))
            modules = (module for root in callables for module in root.modules())
            for module in _with_delayed_scaling(modules):
                if (scales := module.get_fp8_meta_tensors()) is not None:
                    what = f"the FP8 scales of a {type(module).__name__}"
                    stack.restore(what, module.reset_fp8_meta_tensors, scales)
            # This includes whether the next module is the first one, which updates FP8 scales.
            stack.callback(_SET_AUTOCAST.find(), _AUTOCAST.find()())
            if not IS_CAPTURING.find()():
                stack.callback(END_CAPTURING.find())
            # Entered last and so left first: the others then exit on the original stream.
            stack.enter_context(super().preserved(callables))
            yield


def options_of(request: CaptureRequest) -> dict[str, Any]:
    """TE's arguments. Given any order, TE returns graphs; without one it replaces forwards."""
    return {
        **{theirs: getattr(request, ours) for theirs, ours in _NAMES.items()},
        "capture_time_hooks": request.hooks,
        "allow_unused_input": True,
        "_order": [1, -1],
        "_num_layers_per_chunk": [len(request.callables)],
        **request.options,
    }


def request_of(
    callables: Sequence[nn.Module],
    sample_args: Sequence[tuple[Any, ...]],
    *,
    _order: Sequence[int] = (1, -1),
    _num_layers_per_chunk: Sequence[int] | None = None,
    **options: Any,
) -> CaptureRequest:
    """What a call of TE's ``make_graphed_callables`` with these arguments asks for.

    Raises CaptureError if that is not one microbatch of all callables.
    """
    if [*_order] != [1, -1]:
        raise CaptureError(
            f"the order of passes is {_order}: each callable has one sample and one graph. Leave "
            "pipeline parallelism out"
        )
    own = {ours: options.pop(theirs) for theirs, ours in _NAMES.items() if theirs in options}
    return CaptureRequest(tuple(callables), [*sample_args], options=options, **own)


def _with_delayed_scaling(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        meta = getattr(module, "fp8_meta", {})
        is_delayed = all(hasattr(meta.get(key), "amax_history") for key in _SCALINGS)
        if is_delayed and hasattr(module, "get_fp8_meta_tensors"):
            yield module


def _cell(function: Any, name: str) -> CellType:
    cells = cells_of(inspect.unwrap(function))
    if name not in cells:
        raise changed(
            "transformer-engine", _MAKER, f"{_FUNCTION.expected}, with a variable {name} around it"
        )
    return cells[name]
