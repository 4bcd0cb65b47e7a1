"""Installs the parts of the fast path and removes them in reverse order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron_cg.fastpath.gradients import bucketing as gradients
from megatron_cg.fastpath.gradients.bucketing import GradientBucketing, install_gradients
from megatron_cg.fastpath.gradients.detached_in_graphs import detach_in_graphs
from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights, install_detached
from megatron_cg.fastpath.not_applicable import NotApplicableError
from megatron_cg.fastpath.optimizer import clipping, local_tensors
from megatron_cg.fastpath.optimizer import main_weights as weights
from megatron_cg.fastpath.optimizer.clipping import install_clip
from megatron_cg.fastpath.optimizer.local_tensors import install_adam
from megatron_cg.fastpath.optimizer.main_weights import install_main_gradients, install_main_weights
from megatron_cg.fastpath.params import gather, unshard
from megatron_cg.fastpath.params.deferred_prefetch import DeferredPrefetch
from megatron_cg.fastpath.params.gather import install_gathers
from megatron_cg.fastpath.params.unshard import install_unshard
from megatron_cg.fsdp.fsdp_symbols import unknown_bodies
from megatron_cg.memory.scratch import ScratchMemory
from megatron_cg.replay.replay_function import ReplayFunction
from megatron_cg.upstream.symbols import Symbol

logger = logging.getLogger(__name__)
Undo = Callable[[], None]
_OF_GRAPHS = "detached-weights-of-graphs"
_warned: set[tuple[str, str]] = set()


def _warn_once(part: str, why: str) -> None:
    if (part, why) not in _warned:
        _warned.add((part, why))
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

    def _add_around_units(
        self, graphed: Collection[nn.Module], replays: Sequence[ReplayFunction]
    ) -> None:
        """Add the parts around the passes of units: detached weights, unshards and gathers."""
        fsdp, deferred = self._fsdp, DeferredPrefetch(graphed)
        self._add("detached-weights", lambda: install_detached(self._detaches(fsdp, graphed)))
        if replays:
            self._add(
                _OF_GRAPHS,
                lambda: detach_in_graphs(self._detaches(fsdp, graphed), replays, deferred.launched),
            )
        if _OF_GRAPHS in self.parts:
            self.deferred = deferred
        else:
            why = f"{_OF_GRAPHS} is not installed, so no launch is seen"
            self.left_out["deferred-prefetch"] = why
        self._add(
            "unshard",
            lambda: install_unshard(fsdp, self._unit_is_done, self.deferred),
            unshard.REPLACES,
        )
        self._add("gathers", lambda: install_gathers(fsdp, self.deferred), gather.REPLACES)

    def _gradients(self, fsdp: Any) -> Undo:
        strategy = fsdp.data_parallel_sharding_strategy
        if strategy != "optim_grads_params":
            raise NotApplicableError(
                f"the sharding strategy is {strategy}, in which no hook tells that a unit's "
                "backward pass is done"
            )
        self.bucketing, undo = install_gradients(fsdp)
        return undo

    def _detaches(self, fsdp: Any, graphed: Container[nn.Module]) -> DetachedWeights:
        """Return the instance that all parts share: a weight is detached only once."""
        if self.bucketing is None:
            raise NotApplicableError("gradients are left to Megatron-FSDP")
        if self._detached is None:
            self._detached = DetachedWeights(fsdp.module, self.bucketing, graphed)
        return self._detached

    def _unit_is_done(self, unit: nn.Module) -> None:
        if self.bucketing is not None:
            self.bucketing.unit_is_done(unit)


def install(
    fsdp: Any,
    scratch: ScratchMemory | None = None,
    optimizers: Sequence[Any] = (),
    graphed: Collection[nn.Module] = (),
    replays: Sequence[ReplayFunction] = (),
) -> FastPath:
    """Install every part that is applicable to ``fsdp``, between two steps.

    Args:
        fsdp: the ``MegatronFSDP``.
        scratch: memory for tensors that live only between two steps; None: ordinary memory.
        optimizers: the optimizers of its parameters, Megatron's or torch's.
        graphed: modules inside graphs, whose Python code no longer runs.
        replays: how autograd sees each of their graphs.

    Returns:
        The installed parts; ``close`` removes them.

    Raises:
        UpstreamChangedError: a symbol that a part relies on is gone; nothing stays changed.
    """
    path = FastPath(fsdp)
    try:
        # Without "unshard" nothing reports the end of a unit's backward pass.
        replaces = (*gradients.REPLACES, *unshard.REPLACES)
        path._add("gradients", lambda: path._gradients(fsdp), replaces)
        path._add_around_units(graphed, replays)
        path._add(
            "main-gradients",
            lambda: install_main_gradients(fsdp, scratch),
            weights.REPLACES_ATTACHING,
        )
        path._add("main-weights", lambda: install_main_weights(fsdp), weights.REPLACES_INSTALLING)
        if optimizers:
            path._add("clipping", lambda: install_clip(optimizers), clipping.REPLACES)
            path._add("optimizer", lambda: install_adam(optimizers), local_tensors.REPLACES)
    except BaseException:
        path.close()
        raise
    for name, why in path.left_out.items():
        logger.info("FSDP fast path: %s left to Megatron-FSDP, because %s.", name, why)
    return path
