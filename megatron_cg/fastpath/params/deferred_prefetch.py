"""Gathers for the next unit, issued once the graph of this one is launched.

Note [Launch first]
    Before a unit's forward pass Megatron-FSDP gathers its weights and those of the unit that
    follows, and only then does the unit run. Asking for a gather takes the host about as long as
    the gather takes the GPU, so where the GPU waits for the host (the first layers of a step; all
    layers of a dropless MoE model) it does nothing meanwhile, and the gather is exposed. So the
    gather for the next unit is held until the graph of this one is launched.
    The order of collectives stays: nothing else is gathered or reduced between the two places, and
    what is still held when more is asked for goes first.

Note [As early on the device]
    The gather overwrites the buffer of the unit before, so it has to wait for that unit's kernels,
    but not for the graph that was launched just now. It waits for an event from where
    Megatron-FSDP would have issued it.

Note [One order over all communicators]
    NCCL requires the collectives of a process in one order on all ranks, over all of its
    communicators (NCCL user guide, "Using multiple NCCL communicators concurrently"). After a
    launch and the gather comes the eager rest of the layer, such as the all-to-all of experts. So
    a rank that does not launch, because a guard refuses the replay, issues the gather before
    anything of the layer runs eagerly. The order on every rank is: (1) the gather of this unit's
    weights, (2) the collectives in its graph, by a replay on all ranks or on none, (3) the gather
    for the next unit, (4) collectives of the eager rest. Where all ranks leave a graph with
    collectives, (3) is before (2) on all of them. Every eager pass of a graphed unit begins in
    ``megatron_cg/replay/eager_passes.py``, which issues what is held. An error before a replay,
    and a verification, issue it too.

A unit that comes to neither, since somebody replaced its forward for one, has its followers
gathered after its forward pass, or when more is asked for: later than by Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn


class DeferredPrefetch:
    """Holds gathers until a graph is launched; one for a model.

    Args:
        graphed: modules inside of graphs, of each of which :meth:`launched` is called; none:
            nothing is held.
    """

    def __init__(self, graphed: Iterable[nn.Module] = ()) -> None:
        self._graphed = tuple(graphed)
        self._weights: frozenset[int] | None = None
        self._gather: Callable[[Any], None] | None = None
        self._since: Any = None

    def begins_with_graph(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether a forward pass with ``weights`` comes to a graph first.

        To be asked in a pass: between two steps modules may hold the optimizer's DTensors.
        """
        if self._weights is None:
            own = (p for module in self._graphed for p in module.parameters(recurse=False))
            self._weights = frozenset(map(id, own))
        return bool(weights) and id(weights[0]) in self._weights

    def hold(self, gather: Callable[[Any], None]) -> None:
        """Hold ``gather``, which is called once: with the event that it waits for, or with None."""
        if self._since is None:
            self._since = torch.cuda.Event()
        self._since.record()
        self._gather = gather

    def launched(self) -> None:
        """A graph was launched on the stream of the unit's forward pass."""
        self._issue(self._since)

    def issue(self) -> None:
        """Issue what is held as Megatron-FSDP would now."""
        self._issue(None)

    def _issue(self, since: Any) -> None:
        gather, self._gather = self._gather, None
        if gather is not None:
            gather(since)

    def drop(self) -> None:
        """Forget it: the pass that asked for it has failed."""
        self._gather = None
