"""Weights of graphs, detached from autograd.

A graph's backward replay computes the gradients of all its weights. The backend returns copies of
them, autograd visits each weight, and the gradients are copied once more, into Megatron-FSDP's
bucket. Here a graph is replayed without its weights among autograd's inputs, as a grouped GEMM is
run (``detached_weights.py``). One copy moves the gradients from the graph's own memory into the
bucket.

See Note [Borrowed gradients] in ``megatron_cg/replay/replay_function.py``. If the gradients
cannot go into their bucket at once, because a weight is also used in another way, they are copied
out of the graph's memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights, call_detached
from megatron_cg.replay.replay_function import ReplayFunction


def detach_in_graphs(
    detached: DetachedWeights, replays: Sequence[ReplayFunction], launched: Callable[[], None]
) -> Callable[[], None]:
    """Detach the weights of graphs from autograd; returns the undo.

    Args:
        detached: selects the weights that can be detached.
        replays: how autograd sees each graph.
        launched: called after the launch of each forward replay.
    """
    with ExitStack() as undo:
        undo.callback(detached.close)
        for replay in replays:
            replacement = _DetachedReplay(detached, replay, launched)
            undo.callback(replay.replace(replacement))
            undo.callback(replacement.end)
        return undo.pop_all().close


class _DetachedReplay:
    """Called instead of a graph's autograd function."""

    def __init__(
        self, detached: DetachedWeights, replay: ReplayFunction, launched: Callable[[], None]
    ) -> None:
        self._detached, self._replay, self._launched = detached, replay, launched
        self.forward = replay.function.forward
        self._ended = False

    def end(self) -> None:
        """Detach nothing any more, even if something still refers to this object."""
        self._ended = True

    def apply(self, *args: Any) -> Any:
        """Do what the function's own ``apply`` does."""
        if self._ended:
            return self._replay.function.apply(*args)
        first = self._replay.first_weight
        tail = args[first:]
        weights = None
        if torch.is_grad_enabled():
            weights = self._detached.together(tail, of_graph=True)
        if weights is None:
            outputs = self._replay.function.apply(*args)
        else:
            outputs = call_detached(self, weights, args[:first], tail, borrowed=True)
        self._launched()
        return outputs

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        """Return gradients in the graph's own memory; see :class:`.ReplayFunction`."""
        end_borrowing = self._replay.borrow()
        try:
            return self._replay.function.backward(ctx, *gradients)
        finally:
            end_borrowing()
