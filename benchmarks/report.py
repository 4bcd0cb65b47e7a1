"""One measurement as JSON to keep, as Markdown to show, and as a table to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.metrics import RankMetrics, Spread
from megatron_cg.tools.bench.bench_machine import described

SCHEMA = {"name": "megatron_cg.overheads", "version": 1}
TARGET = 0.01
"""Guards and votes together, as a share of a step."""
COLUMNS = ("metric", "rank 0", "highest of all ranks")


@dataclass(frozen=True)
class Measurement:
    """What was measured, on what, and how."""

    run: Mapping[str, Any]
    """What was trained: preset, backend, processes, steps, scopes, flags, command lines."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    eager: Spread
    """Milliseconds of the same steps of the eager run, rank 0."""
    ranks: tuple[RankMetrics, ...]

    @property
    def speed(self) -> float:
        """How many steps with graphs take the time of one eager step, rank 0, by medians."""
        return self.eager.median / self.ranks[0].step_ms.median

    @property
    def share(self) -> float:
        """Guards and votes together, on the rank where they cost most."""
        return max(rank.share for rank in self.ranks)

    def verdict(self) -> str:
        """The share against the target, in words."""
        word = "under" if self.share < TARGET else "over"
        return (
            f"guards and votes together: {self.share:.3%} of a step, "
            f"{word} the target of {TARGET:.0%}"
        )

    def as_json(self) -> dict[str, Any]:
        """All of it, in the form that ``SCHEMA`` names."""
        return {
            "schema": SCHEMA,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "run": dict(self.run),
            "eager_step_ms": asdict(self.eager),
            "ranks": [asdict(rank) for rank in self.ranks],
            "speed": self.speed,
            "share": self.share,
            "target_share": TARGET,
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """The table's rows: a metric's name, its value on rank 0, and its highest value."""
        rows = [self._row("step with graphs, median, ms", lambda r: r.step_ms.median, ".3f")]
        rows += [
            ("eager step, median, ms", f"{self.eager.median:.3f}", ""),
            ("eager step / step with graphs", f"{self.speed:.3f}", ""),
        ]
        for name, read, form in _METRICS:
            rows.append(self._row(name, read, form))
        return rows

    def _row(self, name: str, read: Any, form: str) -> tuple[str, str, str]:
        values = [format(read(rank), form) for rank in self.ranks]
        return name, values[0], format(max(read(rank) for rank in self.ranks), form)


_METRICS: tuple[tuple[str, Any, str], ...] = (
    ("replays a step", lambda r: r.replays, "g"),
    ("guards a step, mean, µs", lambda r: r.guard_us.mean, ".1f"),
    ("guards a step, 95 of 100 steps, µs", lambda r: r.guard_us.p95, ".1f"),
    ("counting inputs and guarding the backward, mean, µs", lambda r: r.around_us.mean, ".1f"),
    ("both, a replay, µs", lambda r: r.guard_us_per_replay, ".1f"),
    ("both, share of a step", lambda r: r.guard_share, ".3%"),
    ("votes a step, mean, µs", lambda r: r.vote_us.mean, ".1f"),
    ("votes a step, 95 of 100 steps, µs", lambda r: r.vote_us.p95, ".1f"),
    ("of which issuing, mean, µs", lambda r: r.issuing_us.mean, ".1f"),
    ("of which waiting, mean, µs", lambda r: r.waiting_us.mean, ".1f"),
    ("votes, share of a step", lambda r: r.vote_share, ".3%"),
    ("guards and votes, share of a step", lambda r: r.share, ".3%"),
    ("inputs copied a replay", lambda r: r.tensors_copied, ".2f"),
    ("inputs in place a replay", lambda r: r.tensors_in_place, ".2f"),
    ("bytes copied a replay", lambda r: r.bytes_copied, ",.0f"),
    ("mismatches", lambda r: r.mismatched, "d"),
)


def print_table(console: Console, title: str, measurement: Measurement) -> None:
    """The rows, then the verdict."""
    table = Table(COLUMNS[0], title=title)
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right")
    for row in measurement.rows():
        table.add_row(*row)
    console.print(table)
    for vote in measurement.ranks[0].votes_waited_for:
        console.print(
            f"vote on {vote['kind']}, rank 0: {vote['waiting_ms']:.2f} ms waiting, "
            f"{vote['exchanging_ms']:.2f} ms exchanging",
            highlight=False,
        )
    console.print(measurement.verdict(), highlight=False, soft_wrap=True)


def as_markdown(title: str, measurement: Measurement) -> str:
    """The same, with what it was measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in measurement.versions.items())
    lines = [f"# {title}", "", f"Machine: {described(measurement.machine)}. {versions}.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|"]
    lines += [f"| {' | '.join(row)} |" for row in measurement.rows()]
    return "\n".join([*lines, "", f"{measurement.verdict().capitalize()}.", ""])
