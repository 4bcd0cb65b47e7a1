"""What a real capture took, measured where a plan estimates it; for ``check.py``.

Two readings are enough: how much each forward capture left allocated, read by capture-time hooks
around it, and what the graphs' pool has reserved when all is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_cg.fsdp.transform import CAPTURE_TIME_KEYS, CaptureTimeHooks
from megatron_cg.plan.pool import round_up


class Allocator(NamedTuple):
    """What is asked of the device's allocator."""

    allocated: Callable[[], int] = torch.cuda.memory_allocated
    snapshot: Callable[[], Any] = torch.cuda.memory_snapshot
    new_pool: Callable[[], Any] = torch.cuda.graph_pool_handle


_FIRST, _LAST = -3, -4
"""Ids of our hooks; torch counts its own from 0, and the guard's are -1 and -2."""


class HeldByForward:
    """Bytes that each unit's forward capture left allocated.

    Args:
        read: gives the bytes allocated now, such as ``torch.cuda.memory_allocated``.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._before = 0
        self.bytes: dict[str, int] = {}
        """By the unit's name; a later pass overwrites an earlier one, and capture comes last."""

    def around(self, names: Sequence[str], hooks: Sequence[CaptureTimeHooks]) -> list[Any]:
        """``hooks`` of each unit with ours nearest to the captured forward pass."""
        return [self._of(name, unit) for name, unit in zip(names, hooks, strict=True)]

    def _of(self, name: str, hooks: CaptureTimeHooks) -> CaptureTimeHooks:
        def begin(_module: nn.Module) -> None:
            self._before = self._read()

        def end(_module: nn.Module) -> None:
            self.bytes[name] = self._read() - self._before

        found: CaptureTimeHooks = {key: dict(hooks.get(key, {})) for key in CAPTURE_TIME_KEYS}
        found["forward_pre_hooks"] = {**found["forward_pre_hooks"], _LAST: begin}
        found["forward_hooks"] = {_FIRST: end, **found["forward_hooks"]}
        return found


def pool_bytes(snapshot: Iterable[Mapping[str, Any]], pool: tuple[int, int]) -> dict[str, int]:
    """What one pool has, from ``torch.cuda.memory_snapshot()`` (torch 2.11).

    Args:
        snapshot: the segments, each with ``segment_pool_id``, ``total_size``, ``allocated_size``.
        pool: what ``torch.cuda.graph_pool_handle()`` gave, and TE was given.
    """
    segments = [s for s in snapshot if tuple(s["segment_pool_id"]) == tuple(pool)]
    return {
        "reserved": sum(int(s["total_size"]) for s in segments),
        "allocated": sum(int(s["allocated_size"]) for s in segments),
    }


def measured_capture(
    capture: Callable[..., Any],
    names: Sequence[str],
    layers: Sequence[nn.Module],
    args: Sequence[Sequence[torch.Tensor]],
    *,
    sample_kwargs: Sequence[Mapping[str, torch.Tensor]],
    capture_time_hooks: Sequence[CaptureTimeHooks],
    borrowed: Iterable[torch.Tensor] = (),
    allocator: Allocator | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """``capture`` as it is, and the figures of ``check.py`` for a run's record.

    Args:
        capture: a backend's, of TE.
        names: of the units, as :attr:`megatron_cg.capture.transaction.Unit.name`.
        layers: the units' modules.
        args: static inputs of each graph.
        sample_kwargs: those by keyword.
        capture_time_hooks: of each unit.
        borrowed: inputs that graphs read in place, which take no memory of their own.
        allocator: the GPU's when None.
        **options: other arguments of ``capture``.
    """
    device = allocator or Allocator()
    held = HeldByForward(device.allocated)
    pool = options.pop("pool", None) or device.new_pool()
    graphs = capture(
        layers,
        args,
        sample_kwargs=sample_kwargs,
        capture_time_hooks=held.around(names, capture_time_hooks),
        pool=pool,
        **options,
    )
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
