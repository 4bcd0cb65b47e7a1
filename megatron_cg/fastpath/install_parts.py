"""Installs the parts of the fast path and removes them in reverse order."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.fastpath import (
    between_passes,
    bucketing,
    gather,
    optimizer_step,
    scaled_copies,
    under_v2,
)
from megatron_cg.fastpath.detached_weights import DetachedWeights, detach_in_graphs
from megatron_cg.fastpath.gather import DeferredPrefetch
from megatron_cg.fastpath.optimizer_step import IdlePool
from megatron_cg.fastpath.part import NotApplicableError, unknown_bodies
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.replay.guarded_graph import ReplayFunction
from megatron_cg.upstream.patch import Undo
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)
_STAYS_OFF = (
    "FSDP fast path: %s stays off, because %s. Training goes on without it. megatron-cg doctor "
    "names all such functions."
)
_OF_GRAPHS = "detached-weights-of-graphs"


class FastPath:
    """Replacements for Megatron-FSDP's bookkeeping, for one model.

    A part that is not applicable is skipped, and ``left_out`` maps its name to the reason.
    """

    def __init__(self, fsdp: Any) -> None:
        self._fsdp = fsdp
        self.parts: list[str] = []
        self.left_out: dict[str, str] = {}
        self.bucketing: Any = None
        """The :class:`.GradientBucketing`, if the part for gradients is on."""
        self.deferred = DeferredPrefetch()
        self.flush_prefetch = self.deferred.issue
        """Issues the gathers that are held, as before a graphed unit runs eagerly."""
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
            _warn_once(_STAYS_OFF, name, self.left_out[name])
        else:
            try:
                self._undo.callback(put_in())
            except NotApplicableError as why:
                self.left_out[name] = str(why)
            else:
                self.parts.append(name)

    def add_of_optimizers(self, optimizers: Sequence[Any]) -> None:
        if optimizers:
            between, step = between_passes, optimizer_step
            self.add("clipping", between.scale_local_gradients, between.REPLACES_SCALING)
            self.add("rerun-vote", between.vote_beside, between.REPLACES_VOTE)
            self.add("optimizer", lambda: step.install_adam(optimizers), step.REPLACES_STEP)

    def bucket_gradients(self) -> Undo:
        self.bucketing, undo = bucketing.install_gradients(self._fsdp)
        return undo


def install_for(
    sharding: Sharding,
    backend: Backend,
    optimizers: Sequence[Any],
    graphed: Collection[nn.Module],
    replays: Sequence[ReplayFunction],
) -> FastPath | None:
    """Install what is applicable to a sharding by Megatron-FSDP; None for any other."""
    if not sharding.groups and sharding.megatron_fsdp is None:
        return None
    scratch = IdlePool(backend.pool) if backend.pool is not None else None
    if sharding.groups:
        return install_under_v2(sharding.groups, scratch, optimizers, replays)
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
        add, deferred, step, between = path.add, path.deferred, optimizer_step, between_passes
        add("unshard", lambda: gather.install_unshard(fsdp, deferred), gather.REPLACES_UNSHARD)
        # It has the fingerprint of what releases a unit, and so ends the wait of gradients.
        add("gradients", path.bucket_gradients, bucketing.REPLACES, needs=["unshard"])
        scale = partial(bucketing.GradientBucketing.scale_copies, path.bucketing)
        add("scaled-copies", scale, scaled_copies.REPLACES, needs=["gradients"])
        in_turn = fsdp.param_and_grad_buffer.double_buf_units
        if fsdp.data_parallel_sharding_strategy == "optim_grads" and in_turn:
            add("ordered-gradients", lambda: bucketing.order_copies(fsdp))
        detached: Any = path.bucketing and DetachedWeights(path.bucketing)
        in_graphs = partial(detach_in_graphs, detached, replays, deferred.launched)
        add(_OF_GRAPHS, in_graphs, needs=["gradients"])
        # Only detached weights of graphs report a launch.
        defer = partial(deferred.install, fsdp, graphed)
        add("deferred-prefetch", defer, gather.REPLACES_GATHERS, needs=[_OF_GRAPHS])
        add("parameters", lambda: between.exchange_parameters(fsdp), between.REPLACES_EXCHANGE)
        attaching, installing = step.REPLACES_ATTACHING, step.REPLACES_INSTALLING
        add("main-gradients", lambda: step.install_main_gradients(fsdp, scratch), attaching)
        add("main-weights", lambda: step.install_main_weights(fsdp), installing)
        path.add_of_optimizers(optimizers)
    return path


def install_under_v2(
    groups: Sequence[Any],
    scratch: IdlePool | None = None,
    optimizers: Sequence[Any] = (),
    replays: Sequence[ReplayFunction] = (),
) -> FastPath:
    """Install every part for Megatron-FSDP v2; see :func:`install`. ``groups`` are the model's."""
    with _installing(groups[0]) as path:
        add, parts = path.add, under_v2
        add("layouts", lambda: parts.keep_layouts(groups[0]), parts.REPLACES_LAYOUTS)
        add("views", lambda: parts.keep_views(groups), parts.REPLACES_VIEWS)
        add("packing", lambda: parts.pack_gradients(groups), parts.REPLACES_PACKING)
        add(_OF_GRAPHS, lambda: parts.detach_weights(groups, replays), parts.REPLACES_HOOKS)
        if optimizers:
            add("casts", lambda: parts.install_casts(optimizers, scratch), parts.REPLACES_CASTS)
        path.add_of_optimizers(optimizers)
    return path
