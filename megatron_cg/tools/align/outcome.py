"""The outcome of two runs: the result of their comparison, and its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_cg.tools.align.compare import Comparison, Run


@dataclass(frozen=True)
class Outcome:
    """``log_tail`` is the end of the log of a failed run; the records are then None."""

    comparison: Comparison
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Each run's command line."""
    log_tail: str = ""
    eager: Run | None = None
    graphed: Run | None = None
