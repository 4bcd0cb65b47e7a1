"""Measures in a real capture what a plan estimates; for ``check.py``.

Two readings are enough: how much each forward capture left allocated (read directly before and
after it), and what the graph pool has reserved after all captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_cg.events import Event, PassBegan, PassEnded, subscribe
from megatron_cg.tools.plan.pool import round_up


class Allocator(NamedTuple):
    """Queries to the device's allocator."""

    allocated: Callable[[], int] = torch.cuda.memory_allocated
    snapshot: Callable[[], Any] = torch.cuda.memory_snapshot
    new_pool: Callable[[], Any] = torch.cuda.graph_pool_handle


class HeldByForward:
    """Bytes that each unit's forward capture left allocated.

    Args:
        read: returns the bytes allocated now, such as ``torch.cuda.memory_allocated``.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._before = 0
        self.bytes: dict[str, int] = {}
        """By the unit's name. A later pass overwrites an earlier one; capture is last."""

    def hear(self, event: Event) -> None:
        """Read before and after each forward pass; for :func:`megatron_cg.events.subscribe`."""
        match event:
            case PassBegan(forward=True):
                self._before = self._read()
            case PassEnded(unit, forward=True):
                self.bytes[unit] = self._read() - self._before


def pool_bytes(snapshot: Iterable[Mapping[str, Any]], pool: tuple[int, int]) -> dict[str, int]:
    """Memory of one pool, from ``torch.cuda.memory_snapshot()`` (torch 2.11).

    Args:
        snapshot: the segments, each with ``segment_pool_id``, ``total_size``, ``allocated_size``.
        pool: the handle from ``torch.cuda.graph_pool_handle()`` that was passed to TE.
    """
    segments = [s for s in snapshot if tuple(s["segment_pool_id"]) == tuple(pool)]
    return {
        "reserved": sum(int(s["total_size"]) for s in segments),
        "allocated": sum(int(s["allocated_size"]) for s in segments),
    }


def measured_capture(
    capture: Callable[..., Any],
    layers: Sequence[nn.Module],
    args: Sequence[Sequence[torch.Tensor]],
    *,
    sample_kwargs: Sequence[Mapping[str, torch.Tensor]],
    borrowed: Iterable[torch.Tensor] = (),
    allocator: Allocator | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Call ``capture``; also return the metrics of ``check.py`` for a run's record.

    Args:
        capture: a backend's ``capture``, of TE.
        layers: the units' modules.
        args: static inputs of each graph.
        sample_kwargs: the static keyword inputs of each graph.
        borrowed: inputs that graphs read in place; they take no memory of their own.
        allocator: the GPU's if None.
        **options: other arguments of ``capture``.
    """
    device = allocator or Allocator()
    held = HeldByForward(device.allocated)
    pool = options.pop("pool", None) or device.new_pool()
    unsubscribe = subscribe(held.hear)
    try:
        graphs = capture(layers, args, sample_kwargs=sample_kwargs, pool=pool, **options)
    finally:
        unsubscribe()
    in_place = {id(tensor.untyped_storage()) for tensor in borrowed}
    inputs = [t for given in args for t in given]
    inputs += [t for given in sample_kwargs for t in given.values()]
    storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in inputs}
    own = {key: size for key, size in storages.items() if key not in in_place}
    return graphs, {
        "pool_reserved": pool_bytes(device.snapshot(), pool)["reserved"],
        "held_by_forward": dict(held.bytes),
        "static_inputs": sum(round_up(size) for size in own.values()),
    }
