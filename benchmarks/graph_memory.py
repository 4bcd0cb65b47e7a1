"""The memory of graphs as a plan has it and as a capture took it, side by side.

Two readings of a capture are enough: what each forward capture left allocated, and what the graph
pool has reserved when all is captured. A record has them under ``graph_memory``::

    {"pool_reserved": bytes,
     "held_by_forward": {"layer 0": bytes},  # by the unit's name
     "static_inputs": bytes,                 # of the sample inputs, each storage once; optional
     "output_gradients": bytes}              # of TE's static gradients of outputs; optional

Where an optional one is missing, both totals have the plan's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_cg.errors import MegatronCGError
from megatron_cg.events import Event, PassBegan, PassEnded, subscribe
from megatron_cg.tools.plan.pool import MIB, round_up

KEY = "graph_memory"
TOLERANCE = 0.15


class CheckError(MegatronCGError):
    """The plan and the record cannot be compared."""


@dataclass(frozen=True)
class Deviation:
    """One term, in bytes."""

    term: str
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """The plan's error as a fraction of the measured value; infinite if that is zero."""
        if self.measured == 0:
            return 0.0 if self.planned == 0 else float("inf")
        return (self.planned - self.measured) / self.measured

    def __str__(self) -> str:
        return (
            f"{self.term}: planned {self.planned / MIB:,.1f} MiB, measured "
            f"{self.measured / MIB:,.1f} MiB, {self.error:+.1%}"
        )


@dataclass(frozen=True)
class Check:
    """The total, which must be within the tolerance, and the terms that explain it."""

    total: Deviation
    terms: tuple[Deviation, ...]

    @property
    def holds(self) -> bool:
        """Whether the total is within :data:`TOLERANCE`."""
        return abs(self.total.error) <= TOLERANCE

    def __str__(self) -> str:
        return "\n".join(map(str, (self.total, *self.terms)))


def check(plan: Mapping[str, Any], record: Mapping[str, Any]) -> Check:
    """Compare ``plan`` with one rank's ``record``.

    Raises CheckError if one of them has no memory of graphs, or if their layers differ.
    """
    measured, planned = record.get(KEY), plan.get(KEY)
    if not measured or "pool_reserved" not in measured or "held_by_forward" not in measured:
        raise CheckError(f"the record has no {KEY} with pool_reserved and held_by_forward in it.")
    if not planned:
        raise CheckError(
            "the plan has no estimates: a rule is broken, or it says why in its notes."
        )
    layers = {f"layer {row['index']}": row["memory"] for row in plan["layers"] if "memory" in row}
    held = measured["held_by_forward"]
    if set(layers) != set(held):
        raise CheckError(
            f"the plan captures {sorted(layers)}, and the run captured {sorted(held)}: they are of "
            "different flags."
        )
    outside = ("static_inputs", "output_gradients")
    both = [
        *((name, planned[name], measured.get(name)) for name in ("pool_reserved", *outside)),
        *(
            (f"held by {name}", memory["saved_activations"] + memory["outputs"], held[name])
            for name, memory in layers.items()
        ),
    ]
    total = measured["pool_reserved"] + sum(measured.get(name, planned[name]) for name in outside)
    return Check(
        Deviation("graph memory", planned["total"], total),
        tuple(Deviation(n.replace("_", " "), one, two) for n, one, two in both if two is not None),
    )


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


def pool_reserved(snapshot: Iterable[Mapping[str, Any]], pool: tuple[int, int]) -> int:
    """Bytes of one pool, by the segments of ``torch.cuda.memory_snapshot()`` (torch 2.11)."""
    return sum(int(s["total_size"]) for s in snapshot if tuple(s["segment_pool_id"]) == tuple(pool))


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
    """Call ``capture``; also return what it took, for a run's record.

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
    own = (round_up(size) for key, size in storages.items() if key not in in_place)
    return graphs, {
        "pool_reserved": pool_reserved(device.snapshot(), pool),
        "held_by_forward": dict(held.bytes),
        "static_inputs": sum(own),
    }
