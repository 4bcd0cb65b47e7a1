"""Which training steps are measured how. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megatron_cg.tools.bench.spreads import FiguresError

VARIABLE = "MEGATRON_CG_BENCH"
"""The environment variable by which a run learns its windows and where its figures go."""
TRACED = "traced"
"""The kind of the steps that are traced by the device alone: as many as are profiled."""


@dataclass(frozen=True)
class Windows:
    """Steps of each kind, in this order; one kind never disturbs another."""

    warmup: int = 3
    """Eager steps before graphs are captured; eager runs have as many."""
    settle: int = 5
    """Steps after capture that are not measured."""
    timed: int = 20
    """Timed, with nothing else about them."""
    probed: int = 4
    """Host time by phase."""
    sampled: int = 0
    """A sampling profile of the host."""
    profiled: int = 2
    """Traced: so many by the device alone, then as many with host events."""
    native: bool = False
    """Not steps: whether the sampling profile has native frames."""

    def __post_init__(self) -> None:
        """Raises FiguresError where nothing would be timed."""
        if self.timed < 1:
            raise FiguresError("there must be one timed step at least: give more --timed-steps.")

    @property
    def steps(self) -> int:
        """All of them together, with the one that ends the last of them."""
        return len(list(self.kinds()))

    def kinds(self) -> Iterator[str]:
        """The kind of each step, in order; the last is ``tail``, which is not measured.

        A step is timed to the start of the next one, so the last that is measured needs another.
        """
        for kind in fields(self):
            if kind.name == "profiled":
                # First, so that nothing of the slower trace is left when these steps are made.
                yield from [TRACED] * self.profiled
            if kind.name != "native":
                yield from [kind.name] * getattr(self, kind.name)
        yield "tail"

    def only_timed(self) -> Windows:
        """The same without any window after the timed one."""
        return replace(self, probed=0, sampled=0, profiled=0, native=False)

    def variable(self, directory: str) -> str:
        """The value of ``VARIABLE`` for a run whose figures go to ``directory``."""
        counts = ",".join(f"{name}={int(count)}" for name, count in asdict(self).items())
        return f"{counts}:{directory}"


def given(environment: Mapping[str, str] = os.environ) -> tuple[Windows, str]:
    """The windows and the directory that this run was started with.

    Raises FiguresError where ``VARIABLE`` is not set or not as :meth:`Windows.variable` made it.
    """
    counts, _, directory = environment.get(VARIABLE, "").partition(":")
    try:
        if not directory:
            raise ValueError("no directory")
        pairs = [pair.split("=") for pair in counts.split(",")]
        found: dict[str, Any] = {name: int(count) for name, count in pairs}
        return Windows(**found | {"native": bool(found.get("native"))}), directory
    except (TypeError, ValueError) as error:
        raise FiguresError(
            f"{VARIABLE} does not say what to measure: start this run by megatron-cg bench."
        ) from error
