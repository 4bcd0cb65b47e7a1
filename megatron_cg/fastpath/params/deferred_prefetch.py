"""Deferred prefetch: the next unit is gathered after the launch of this unit's graph.

Note [Launch first]
    Before a unit's forward pass Megatron-FSDP gathers its weights and those of the next unit. Only
    then does the unit run. Issuing a gather takes the host about as long as the gather takes the
    GPU. If the GPU waits for the host (in the first layers of a step; in all layers of a dropless
    MoE model), the GPU is idle in that time, and the gather is exposed. So the gather for the next
    unit is held until the graph of this unit is launched.
    The order of collectives does not change: nothing else is gathered or reduced between the two
    places, and a held gather is issued before any further gather.

Note [As early on the device]
    The gather overwrites the buffer of the previous unit. So it must wait for that unit's kernels,
    but not for the graph that was just launched. It waits for an event that is recorded where
    Megatron-FSDP would have issued the gather.

Note [One order over all communicators]
    NCCL requires that all ranks issue the collectives of a process in one order, across all of its
    communicators (NCCL user guide, "Using multiple NCCL communicators concurrently"). After the
    launch and the gather the eager rest of the layer runs, with collectives such as the all-to-all
    of experts. A rank does not launch if a guard refuses the replay. So such a rank issues the
    gather before any part of the layer runs eagerly. The order on every rank is: (1) the gather of
    this unit's weights, (2) the collectives in its graph, replayed on all ranks or on none, (3) the
    gather for the next unit, (4) the collectives of the eager rest. If all ranks fall back to eager
    for a graph with collectives, (3) comes before (2) on all of them. Every eager pass of a graphed
    unit begins in ``megatron_cg/replay/eager_passes.py``, which issues what is held. An error
    before a replay, and a verification, issue it too.

A unit may reach neither a launch nor such an eager pass, because other code replaced its forward.
Then the held gather is issued after the unit's forward pass, or before the next gather. That is
later than in Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn


class DeferredPrefetch:
    """Holds gathers until a graph is launched; one instance per model.

    Args:
        graphed: modules inside graphs, whose launches call :meth:`launched`. If there are none,
            nothing is held.
    """

    def __init__(self, graphed: Iterable[nn.Module] = ()) -> None:
        self._graphed = tuple(graphed)
        self._weights: frozenset[int] | None = None
        self._gather: Callable[[Any], None] | None = None
        self._since: Any = None

    def begins_with_graph(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether a forward pass with ``weights`` begins with a graph.

        Call it in a pass only: between two steps modules may hold the optimizer's DTensors.
        """
        if self._weights is None:
            own = (p for module in self._graphed for p in module.parameters(recurse=False))
            self._weights = frozenset(map(id, own))
        return bool(weights) and id(weights[0]) in self._weights

    def hold(self, gather: Callable[[Any], None]) -> None:
        """Hold ``gather``. It is called once, with the event to wait for or with None."""
        if self._since is None:
            self._since = torch.cuda.Event()
        self._since.record()
        self._gather = gather

    def launched(self) -> None:
        """Issue what is held, after a graph was launched on the stream of the forward pass."""
        self._issue(self._since)

    def issue(self) -> None:
        """Issue what is held, as Megatron-FSDP would at this point."""
        self._issue(None)

    def _issue(self, since: Any) -> None:
        gather, self._gather = self._gather, None
        if gather is not None:
            gather(since)

    def drop(self) -> None:
        """Discard what is held: the pass that requested it has failed."""
        self._gather = None
