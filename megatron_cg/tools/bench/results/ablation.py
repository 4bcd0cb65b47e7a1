"""Shows what each part of the fast path is worth, from runs that leave it out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_cg.arguments.fast_path_parts import PARTS, with_dependents
from megatron_cg.tools.bench.results.grids import NONE, grid, number
from megatron_cg.tools.bench.results.metrics import Row
from megatron_cg.tools.bench.results.rounds import Ratio
from megatron_cg.tools.bench.runs.configurations import (
    ABLATIONS,
    EAGER_FAST_PATH,
    GRAPHS,
    PLAIN,
    ablation,
)

_LABELS = {PLAIN: "all parts", EAGER_FAST_PATH: "the graphs, but no part"}
TITLE = "without a part of the fast path"
_OTHER_PHASES = ("forward", "backward", "replay", "guard", "votes", "log")
COLUMNS = ("left out", "ms a step", "% of a step", "least to most, %", "host ms a step")
HOW = (
    f"How much longer a step is when a part of the fast path is left out, compared with `{GRAPHS}` "
    "in the same round. Parts that need it are left out with it. Host time is that of "
    "Megatron-FSDP's and the optimizer's bookkeeping, in the probed steps of rank 0."
)


@dataclass(frozen=True)
class Loss:
    """What a run loses without something."""

    left_out: str
    ratio: Ratio
    """Its step time relative to that of all parts with graphs."""
    ms: float
    """Of a step."""
    host_ms: float | None
    """Of the host's bookkeeping; None if it was not probed."""

    def cells(self) -> list[str]:
        """The row of a table."""
        percent = [(value - 1) * 100 for value in (self.ratio.median, self.ratio.least)]
        percent.append((self.ratio.most - 1) * 100)
        several = self.ratio.rounds > 1
        between = f"{percent[1]:+.1f} to {percent[2]:+.1f}" if several else NONE
        own = [number(self.ms, "+,.2f"), number(percent[0], "+.1f"), between]
        return [self.left_out, *own, number(self.host_ms, "+,.2f")]


def losses(rows: Sequence[Row]) -> list[Loss]:
    """What each row of one table that leaves something out loses, the largest loss first."""
    graphs = next((row for row in rows if row.name == GRAPHS), None)
    if graphs is None or not any(row.name in ABLATIONS for row in rows):
        return []
    found = []
    for row in rows:
        ratio = row.step_ratio(graphs)
        if ratio is None or row.name not in (*ABLATIONS, *_LABELS):
            continue
        step = graphs.metrics["step"]
        ms = (ratio.median - 1) * step if step else 0.0
        mine, theirs = bookkeeping(row), bookkeeping(graphs)
        host = mine - theirs if mine is not None and theirs is not None else None
        found.append(Loss(_label(row.name), ratio, ms, host))
    return sorted(found, key=lambda loss: -loss.ms)


def ablation_lines(rows: Sequence[Row]) -> list[str]:
    """The table of one shape; empty if no run left a part out."""
    found = losses(rows)
    if not found:
        return []
    return [HOW, "", *grid(COLUMNS, [loss.cells() for loss in found]), ""]


def bookkeeping(row: Row) -> float | None:
    """Host time of Megatron-FSDP's and the optimizer's bookkeeping, in ms a step.

    It is the own time of all phases but the passes themselves, replays, votes, and waits.
    """
    ranks = row.result["ranks"]
    probed = ranks[0].get("probed") if ranks else None
    if not probed:
        return None
    return sum(
        float(phase["own_ms"])
        for phase in probed["phases"]
        if phase["phase"].partition(":")[0] not in _OTHER_PHASES
        and not phase["phase"].endswith(": wait")
    )


def _label(name: str) -> str:
    if name in _LABELS:
        return _LABELS[name]
    part = name.removeprefix(ablation(""))
    others = [other for other in PARTS if other in with_dependents(part) - {part}]
    return f"{part}, with {', '.join(others)}" if others else part
