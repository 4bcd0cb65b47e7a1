"""Defines which training steps are measured, and how. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from megatron_cg.tools.bench import BenchError

VARIABLE = "MEGATRON_CG_BENCH"
"""The environment variable that tells a run its windows and the directory of its metrics."""
TRACED = "traced"
"""The steps traced with device events only; as many as ``profiled``."""


@dataclass(frozen=True)
class Windows:
    """Number of steps of each kind, in this order. The kinds do not disturb each other."""

    warmup: int = 3
    """Eager steps before graphs are captured; eager runs have as many."""
    settle: int = 5
    """Steps after capture that are not measured."""
    timed: int = 20
    """Steps that are timed and not measured otherwise."""
    probed: int = 4
    """Host time by phase."""
    sampled: int = 0
    """A sampling profile of the host."""
    profiled: int = 2
    """Traced steps: this many with device events only, then as many with host events."""
    native: bool = False
    """Not a number of steps: whether the sampling profile has native frames."""

    @property
    def steps(self) -> int:
        """The total number of steps, including the extra one at the end."""
        return len(list(self.kinds()))

    def kinds(self) -> Iterator[str]:
        """The kind of each step, in order; the last is ``tail``, which is not measured.

        A step is timed up to the start of the next one, so the last measured step needs a
        successor.
        """
        for kind in ("warmup", "settle", "timed", "probed", "sampled"):
            yield from [kind] * getattr(self, kind)
        # The device alone first, so that the slower trace cannot affect these steps.
        yield from [TRACED] * self.profiled
        yield from ["profiled"] * self.profiled
        yield "tail"

    def only_timed(self) -> Windows:
        """The same windows without those after the timed one."""
        return replace(self, probed=0, sampled=0, profiled=0, native=False)

    def variable(self, directory: str) -> str:
        """The value of ``VARIABLE`` for a run that writes its metrics to ``directory``."""
        return json.dumps([asdict(self), directory])


def given(environment: Mapping[str, str] = os.environ) -> tuple[Windows, str]:
    """The windows and the directory that this run was started with.

    Raises BenchError if ``VARIABLE`` is not set or not what :meth:`Windows.variable` makes.
    """
    try:
        windows, directory = json.loads(environment.get(VARIABLE, ""))
        return Windows(**windows), str(directory)
    except (TypeError, ValueError) as error:
        raise BenchError(
            f"{VARIABLE} does not say what to measure: start this run by megatron-cg bench."
        ) from error
