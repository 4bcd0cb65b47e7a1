"""What came of two runs: the verdict and what led to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_cg.tools.align.compare import Comparison, Run


@dataclass(frozen=True)
class Outcome:
    """``log_tail`` is the end of the log of a run that failed; the records are None then."""

    comparison: Comparison
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Each run's command line."""
    log_tail: str = ""
    eager: Run | None = None
    graphed: Run | None = None
