"""Compares a plan's memory with a measured run. Pure.

A comparable record (``telemetry/record.py``) has these fields under ``graph_memory``::

    {"pool_reserved": bytes,               # measure.pool_bytes, when all is captured
     "held_by_forward": {"layer 0": bytes},  # measure.HeldByForward.bytes, by the unit's name
     "static_inputs": bytes,               # of the sample inputs, each storage once; optional
     "output_gradients": bytes}            # of TE's static gradients of outputs; optional

If an optional field is missing, both totals use the plan's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_cg.errors import MegatronCGError

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
        mib = 2**20
        return (
            f"{self.term}: planned {self.planned / mib:,.1f} MiB, measured "
            f"{self.measured / mib:,.1f} MiB, {self.error:+.1%}"
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

    Raises CheckError when one of them lacks the metrics, or when their layers differ.
    """
    measured, planned = record.get(KEY), plan.get(KEY)
    if not measured or "pool_reserved" not in measured or "held_by_forward" not in measured:
        raise CheckError(f"the record has no {KEY} with pool_reserved and held_by_forward in it.")
    if not planned:
        raise CheckError(
            "the plan has no estimates: a rule is broken, or it says why in its notes."
        )
    layers = {f"layer {row['index']}": row for row in plan["layers"] if "memory" in row}
    held = measured["held_by_forward"]
    if set(layers) != set(held):
        raise CheckError(
            f"the plan captures {sorted(layers)}, and the run captured {sorted(held)}: they are of "
            "different flags."
        )
    outside = {
        name: measured.get(name, planned[name]) for name in ("static_inputs", "output_gradients")
    }
    terms = [
        Deviation("pool reserved", planned["pool_reserved"], measured["pool_reserved"]),
        *(
            Deviation(name.replace("_", " "), planned[name], measured[name])
            for name in outside
            if name in measured
        ),
        *(Deviation(f"held by {name}", _held(layers[name]), held[name]) for name in layers),
    ]
    total = measured["pool_reserved"] + sum(outside.values())
    return Check(Deviation("graph memory", planned["total"], total), tuple(terms))


def _held(row: Mapping[str, Any]) -> int:
    memory = row["memory"]
    return int(memory["saved_activations"] + memory["outputs"])
