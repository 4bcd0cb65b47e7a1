"""Two sets of results, figure by figure. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_cg.bench.figures import Figures, figures, step_median
from megatron_cg.bench.schedule import slug
from megatron_cg.bench.store import Result, newest

COMPARED: dict[str, Callable[[Figures], float | None]] = {
    "step ms": step_median,
    "step / busy": lambda found: found.step_per_busy,
    "GPU busy ms": lambda found: found.busy,
    "kernel launches": lambda found: found.kernel_launches,
    "peak allocated MiB": lambda found: found.peak_allocated,
    "peak reserved MiB": lambda found: found.peak_reserved,
    "capture s": lambda found: found.capture_seconds,
    "peak in capture MiB": lambda found: found.capture_peak,
    "bytes a replay": lambda found: found.bytes_per_replay,
}


@dataclass(frozen=True)
class Change:
    """One figure of one run, then and now."""

    name: str
    figure: str
    old: float
    new: float

    @property
    def ratio(self) -> float | None:
        """Old over new: above 1 it has become less."""
        return self.old / self.new if self.new else None


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """Every figure that both have, of runs with the same key."""
    before = {slug(result["key"]): figures(result) for result in newest(old)}
    changes = []
    for result in newest(new):
        name = slug(result["key"])
        if name not in before:
            continue
        now = figures(result)
        for figure, read in COMPARED.items():
            was, is_now = read(before[name]), read(now)
            if was is not None and is_now is not None:
                changes.append(Change(name, figure, was, is_now))
    return changes
