"""Installs the parts of the fast path and removes them in reverse order.

Megatron-FSDP v2's part is here: what it computes anew at each call is kept while graphs live.

Note [A layout is a value]
    v2 makes a buffer for the gradients of each group in each microbatch, and one for its weights in
    each step. For each it lays out the tensors again and checks the layout, for which it defines a
    class (``GlobalLayout.__post_init__``). That is half of the time of its hooks. A layout depends
    only on the shapes and the number of shards, and it is frozen, so buffers can share it.

Note [Kept as long as the memory]
    A group gathers weights into one buffer and reduces gradients into another one, and takes a view
    or a DTensor of each parameter from it in each microbatch. Here each is made once. Only the
    group's own two buffers keep them: a buffer that takes the place of one makes its own. A buffer
    whose memory is replaced makes new ones; that is seen by the storage, as in ``bucketing.py``.
    With replicas over which gradients are reduced at the last microbatch, v2 makes a new buffer of
    gradients in each step. There is nothing to keep then, and the old one must be freed.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from weakref import finalize

import torch
from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.fastpath import bucketing, gather, optimizer_step
from megatron_cg.fastpath.bucketing import GradientBucketing
from megatron_cg.fastpath.detached_weights import DetachedWeights, detach_in_graphs
from megatron_cg.fastpath.gather import DeferredPrefetch
from megatron_cg.fastpath.optimizer_step import IdlePool
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.fsdp.roles import fsdp_v2, unknown_bodies
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.replay.unit import ReplayFunction
from megatron_cg.upstream.patch import Undo, combine_undos, replace_function
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)
_LAYOUT, _BUFFER = "layout:GlobalLayout", "dbuffer:DBuffer"
REPLACES_LAYOUTS = (
    *fsdp_v2(f"{_LAYOUT}.build", "lays out a buffer", fingerprints=("65d667e7adb9f2ac",)),
    *fsdp_v2(f"{_LAYOUT}.__post_init__", "checks it", fingerprints=("dcfbd2dbdc608cbe",)),
)
REPLACES_VIEWS = (
    *fsdp_v2(f"{_BUFFER}.get_local_tensor", "a view", fingerprints=("15cd9ae6b2603518",)),
    *fsdp_v2(
        f"{_BUFFER}.get_dtensor",
        "a view as a DTensor",
        fingerprints=("64b72abcf05a58be", "f26bcecbad026ce9"),
    ),
)
RELIES_ON = (
    *REPLACES_LAYOUTS,
    *REPLACES_VIEWS,
    *fsdp_v2(
        "parameter_group:FsdpParameterGroup",
        "parameters that are gathered together",
        *("main_weight", "main_grad", "_main_grad_placements|_accumulation_placements"),
    ),
)
_OF_GRAPHS = "detached-weights-of-graphs"


@cache
def _warn_once(part: str, why: str) -> None:
    logger.warning(
        "FSDP fast path: %s stays off, because %s. Training goes on without it. "
        "megatron-cg doctor --verbose names all such functions.",
        part,
        why,
    )


class FastPath:
    """Replacements for Megatron-FSDP's bookkeeping, for one model.

    A part that is not applicable is skipped, and ``left_out`` maps its name to the reason.
    """

    def __init__(self, fsdp: Any) -> None:
        self._fsdp = fsdp
        self.parts: list[str] = []
        self.left_out: dict[str, str] = {}
        self.bucketing: GradientBucketing | None = None
        self._deferred = DeferredPrefetch()
        self._undo = ExitStack()

    def close(self) -> None:
        """Restore Megatron-FSDP's own functions, in reverse order. Safe to call twice."""
        self._undo.close()

    def add(
        self,
        name: str,
        put_in: Callable[[], Undo],
        replaces: Sequence[Symbol] = (),
        needs: Sequence[str] = (),
    ) -> None:
        """Install a part, unless it is not applicable, or one of the parts in ``needs`` is off."""
        missing = [part for part in needs if part not in self.parts]
        if missing:
            self.left_out[name] = " and ".join(f"the part {part} is off" for part in missing)
        elif unknown := unknown_bodies(replaces, self._fsdp):
            self.left_out[name] = "; ".join(unknown)
            _warn_once(name, self.left_out[name])
        else:
            try:
                self._undo.callback(put_in())
            except NotApplicableError as why:
                self.left_out[name] = str(why)
            else:
                self.parts.append(name)

    def add_of_weights(
        self, graphed: Collection[nn.Module], replays: Sequence[ReplayFunction]
    ) -> None:
        """Add the parts that gather weights, and those that take gradients."""
        fsdp, deferred, add = self._fsdp, self._deferred, self.add
        unsharding, gathering = gather.REPLACES_UNSHARD, gather.REPLACES_GATHERS
        add("unshard", lambda: gather.install_unshard(fsdp, self._end_unit, deferred), unsharding)
        # Without "unshard" nothing reports the end of a unit's backward pass.
        add("gradients", self._bucket_gradients, bucketing.REPLACES, needs=["unshard"])
        in_turn = fsdp.param_and_grad_buffer.double_buf_units
        if fsdp.data_parallel_sharding_strategy == "optim_grads" and in_turn:
            add("ordered-gradients", lambda: bucketing.order_copies(fsdp))
        detached: Any = self.bucketing and DetachedWeights(self.bucketing)
        in_graphs = partial(detach_in_graphs, detached, replays, deferred.launched)
        add(_OF_GRAPHS, in_graphs, needs=["gradients"])
        # Only detached weights of graphs report a launch.
        defer = partial(deferred.install, fsdp, graphed)
        add("deferred-prefetch", defer, gathering, needs=[_OF_GRAPHS])

    def _bucket_gradients(self) -> Undo:
        strategy = self._fsdp.data_parallel_sharding_strategy
        if strategy != "optim_grads_params":
            raise NotApplicableError(
                f"the sharding strategy is {strategy}, in which no hook tells that a unit's "
                "backward pass is done"
            )
        if self._fsdp.report_nan_in_param_grad:
            raise NotApplicableError("each gradient is checked for NaN by itself")
        self.bucketing, undo = bucketing.install_gradients(self._fsdp)
        return undo

    def _end_unit(self, unit: nn.Module) -> None:
        if self.bucketing is not None:
            self.bucketing.unit_is_done(unit)

    def flush_prefetch(self) -> None:
        """Issue the gathers that are held, as before a graphed unit runs eagerly."""
        self._deferred.issue()


def install_for(
    sharding: Sharding,
    backend: Backend,
    optimizers: Sequence[Any],
    graphed: Collection[nn.Module],
    graphs: Iterable[Any],
) -> FastPath | None:
    """Install what is applicable to a sharding by Megatron-FSDP; None for any other."""
    if sharding.groups:
        return install_under_v2(sharding.groups)
    if sharding.megatron_fsdp is None:
        return None
    replays = [backend.replay_function(graph) for graph in graphs]
    scratch = IdlePool(backend.pool) if backend.pool is not None else None
    return install(sharding.megatron_fsdp, scratch, optimizers, graphed, replays)


@contextmanager
def _installing(fsdp: Any) -> Iterator[FastPath]:
    path = FastPath(fsdp)
    try:
        yield path
    except BaseException:
        path.close()
        raise
    for name, why in path.left_out.items():
        logger.info("FSDP fast path: %s left to Megatron-FSDP, because %s.", name, why)


def install(
    fsdp: Any,
    scratch: IdlePool | None = None,
    optimizers: Sequence[Any] = (),
    graphed: Collection[nn.Module] = (),
    replays: Sequence[ReplayFunction] = (),
) -> FastPath:
    """Install every part that is applicable to a ``MegatronFSDP``, between two steps.

    ``scratch`` is memory for tensors that live only between two steps; None: ordinary memory.
    ``optimizers`` are Megatron's or torch's. ``graphed`` are the modules inside graphs, and
    ``replays`` how autograd sees each graph. ``close`` of what is returned removes the parts.

    Raises UpstreamChangedError if a symbol that a part relies on is gone; nothing stays changed.
    """
    with _installing(fsdp) as path:
        path.add_of_weights(graphed, replays)
        add, step = path.add, optimizer_step
        attaching, installing = step.REPLACES_ATTACHING, step.REPLACES_INSTALLING
        add("main-gradients", lambda: step.install_main_gradients(fsdp, scratch), attaching)
        add("main-weights", lambda: step.install_main_weights(fsdp), installing)
        if optimizers:
            add("optimizer", lambda: step.install_adam(optimizers), step.REPLACES_STEP)
    return path


def install_under_v2(groups: Sequence[Any]) -> FastPath:
    with _installing(groups[0]) as path:
        path.add("layouts", lambda: keep_layouts(groups[0]), REPLACES_LAYOUTS)
        path.add("views", lambda: keep_views(groups), REPLACES_VIEWS)
    return path


def keep_layouts(group: Any) -> Undo:
    """See Note [A layout is a value]. It is undone when ``group`` is gone, at the latest."""
    kind: Any = type(group._unsharded_model_weight.layout)
    laid_out = cache(kind.build)

    def build(shapes: Iterable[Iterable[int]], dp_size: int) -> Any:
        return laid_out(tuple(map(torch.Size, shapes)), dp_size)

    return finalize(group, replace_function(kind, "build", build))


def keep_views(groups: Iterable[Any]) -> Undo:
    """See Note [Kept as long as the memory]; returns the undo."""
    return combine_undos(undo for group in groups for undo in _of_group(group))


def _of_group(group: Any) -> Iterator[Undo]:
    yield _kept(group._unsharded_model_weight, "get_local_tensor")
    gradients = group.main_grad
    if gradients is None:
        return
    of_microbatch = getattr(group, "_main_grad_placements", None)
    if of_microbatch is None:
        of_microbatch = group._accumulation_placements
    if tuple(of_microbatch) == gradients.placements == group.main_weight.placements:
        yield _kept(gradients, "get_dtensor")


def _kept(buffer: Any, method: str) -> Undo:
    original = getattr(buffer, method)
    found: dict[int, Any] = {}
    place: tuple[int, int] | None = None

    def of_index(index: int) -> Any:
        nonlocal place
        memory = buffer.local_buffer
        now = (memory.untyped_storage()._cdata, memory.storage_offset())
        if now != place:
            found.clear()
            place = now
        if index not in found:
            found[index] = original(index)
        return found[index]

    return replace_function(buffer, method, of_index)
