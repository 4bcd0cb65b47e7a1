"""Installs the parts of the fast path and removes them in reverse order."""

import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from megatron_cg.fastpath import (
    bucketing,
    gather,
    host_reads,
    optimizer_step,
    scaled_copies,
)
from megatron_cg.fastpath import v2_buffers as v2
from megatron_cg.fastpath.bucketing import GradientBucketing
from megatron_cg.fastpath.detached_weights import (
    DetachedWeights,
    detach_in_graphs,
    detach_in_grouped_gemms,
)
from megatron_cg.fastpath.gather import DeferredPrefetch
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.fsdp.roles import unknown_bodies
from megatron_cg.memory.storage import IdlePool
from megatron_cg.replay.unit import ReplayFunction
from megatron_cg.upstream.patch import Undo, set_attribute
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)
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
        self.deferred = DeferredPrefetch()
        """Holds gathers. They must be issued before a graphed unit runs eagerly."""
        self._detached: DetachedWeights | None = None
        self._undo = ExitStack()

    def close(self) -> None:
        """Restore Megatron-FSDP's own functions, in reverse order. Safe to call twice."""
        self._undo.close()

    def _add(self, name: str, put_in: Callable[[], Undo], replaces: Sequence[Symbol] = ()) -> None:
        unknown = unknown_bodies(replaces, self._fsdp)
        if unknown:
            self.left_out[name] = "; ".join(unknown)
            _warn_once(name, self.left_out[name])
            return
        try:
            self._undo.callback(put_in())
        except NotApplicableError as why:
            self.left_out[name] = str(why)
        else:
            self.parts.append(name)

    def _add_gradients(
        self, graphed: Collection[nn.Module], replays: Sequence[ReplayFunction]
    ) -> None:
        # Without "unshard" nothing reports the end of a unit's backward pass.
        replaces = (*bucketing.REPLACES, *gather.REPLACES_UNSHARD)
        self._add("gradients", self._bucket_gradients, replaces)
        self._add("scaled-copies", self._scale_copies, scaled_copies.REPLACES)
        in_turn = self._fsdp.param_and_grad_buffer.double_buf_units
        if self._fsdp.data_parallel_sharding_strategy == "optim_grads" and in_turn:
            self._add("ordered-gradients", lambda: bucketing.order_copies(self._fsdp))
        deferred = DeferredPrefetch(graphed)
        self._add("detached-weights", lambda: detach_in_grouped_gemms(self._detaches(graphed)))
        if replays:
            self._add(
                _OF_GRAPHS,
                lambda: detach_in_graphs(self._detaches(graphed), replays, deferred.launched),
            )
        if _OF_GRAPHS in self.parts:
            self.deferred = deferred
        else:
            why = f"{_OF_GRAPHS} is not installed, so no launch is seen"
            self.left_out["deferred-prefetch"] = why

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

    def _scale_copies(self) -> Undo:
        if self.bucketing is None or (torch.cuda.is_available() and find_spec("triton") is None):
            raise NotApplicableError("gradients are left to Megatron-FSDP, or Triton is missing")
        return set_attribute(self.bucketing, "scales", True)

    def _detaches(self, graphed: Container[nn.Module]) -> DetachedWeights:
        """Return the instance that both parts share: a weight is detached only once."""
        if self.bucketing is None:
            raise NotApplicableError("gradients are left to Megatron-FSDP")
        if self._detached is None:
            self._detached = DetachedWeights(self._fsdp.module, self.bucketing, graphed)
        return self._detached

    def _unit_is_done(self, unit: nn.Module) -> None:
        if self.bucketing is not None:
            self.bucketing.unit_is_done(unit)


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
        add, step = path._add, optimizer_step
        path._add_gradients(graphed, replays)
        deferred, done = path.deferred, path._unit_is_done
        unsharding, gathering = gather.REPLACES_UNSHARD, gather.REPLACES_GATHERS
        add("unshard", lambda: gather.install_unshard(fsdp, done, deferred), unsharding)
        add("gathers", lambda: gather.install_gathers(fsdp, deferred), gathering)
        attaching, installing = step.REPLACES_ATTACHING, step.REPLACES_INSTALLING
        add("main-gradients", lambda: step.install_main_gradients(fsdp, scratch), attaching)
        add("main-weights", lambda: step.install_main_weights(fsdp), installing)
        if optimizers:
            add("clipping", lambda: step.install_clip(optimizers), step.REPLACES_CLIPPING)
            add("optimizer", lambda: step.install_adam(optimizers), step.REPLACES_STEP)
            add(
                "host-reads", lambda: host_reads.install_host_reads(optimizers), host_reads.REPLACES
            )
    return path


def install_under_v2(groups: Sequence[Any]) -> FastPath:
    with _installing(groups[0]) as path:
        path._add("layouts", lambda: v2.keep_layouts(groups[0]), v2.REPLACES_LAYOUTS)
        path._add("views", lambda: v2.keep_views(groups), v2.REPLACES_VIEWS)
    return path
