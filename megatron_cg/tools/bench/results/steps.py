"""The report's tables of steps and of memory, and the notes that explain them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_cg.tools.bench.results.cells import (
    ELSEWHERE,
    Column,
    baseline_note,
    baseline_title,
    ratio_cell,
    status_label,
    step_ratios,
)
from megatron_cg.tools.bench.results.grids import NONE, filled, grid, number
from megatron_cg.tools.bench.results.metrics import Row

WITH_HOST = " \u2021"
"""Marks metrics from a trace with host events, used when there is no device-only trace."""
_HALVES = (
    '"later / earlier" is of the timed steps\' halves. Where it is not near 1 the steps are not '
    "steady: with experts, new numbers of tokens cost the host time (more --settle-steps)."
)
_TRACED = (
    'From "GPU busy ms" on: rank 0, in steps of which only the GPU\'s work and the calls of CUDA '
    "were traced, so that the host is hardly slower. NCCL is exposed while nothing else runs on "
    "the GPU."
)
_WITH_HOST = (
    "Marked \u2021: in steps traced with all events of the host, which slow it. Idle time can be "
    "much longer than in the timed steps, and NCCL overlap less."
)
_AGAINST = "Steps against each other, row / column"
_ONE_ROUND = (
    "One round: a machine may drift by 10% and more within minutes, and `--rounds` tells smaller "
    "differences from that."
)


def step_lines(rows: Sequence[Row]) -> list[str]:
    """The table of steps, with each round's median if there are several."""
    of_each_round: list[Column] = []
    if _in_several_rounds(rows):
        of_each_round = [("of each round", _medians)]
    columns: list[Column] = [
        ("configuration", status_label),
        _number("step ms, median", "step"),
        *of_each_round,
        ("IQR", _between_quartiles),
        ("least to most", _least_to_most),
        _number("later / earlier", "later_per_earlier", ".2f"),
        *step_ratios(rows),
        _traced("GPU busy ms", "busy"),
        _traced("without NCCL", "busy_without_nccl"),
        _traced("exposed NCCL", "exposed_nccl"),
        _traced("step / busy", "step_per_busy", ".2f"),
        _traced("idle ms (traced)", "idle"),
        _traced("of it for the host", "idle_for_host"),
        _traced("longest gap ms", "longest_gap", ",.2f"),
        _number("launches", "kernel_launches", ",.0f"),
        _number("graphs", "graph_launches", ",.0f"),
    ]
    return [*grid(*filled(columns, rows)), "", *_notes(rows)]


def memory_lines(rows: Sequence[Row]) -> list[str]:
    """The table of memory and captures."""
    over = baseline_title(rows)
    columns: list[Column] = [
        ("configuration", status_label),
        _number("peak allocated MiB", "peak_allocated", ",.0f"),
        (over, _ratio("peak_allocated")),
        _number("peak reserved MiB", "peak_reserved", ",.0f"),
        (over, _ratio("peak_reserved")),
        _number("allocated MiB", "allocated", ",.0f"),
        _number("peak in capture MiB", "capture_peak", ",.0f"),
        (over, _ratio("capture_peak", "peak_allocated")),
        _number("capture s", "capture_seconds", ",.2f"),
        _number("without warmup", "capture_without_warmup", ",.2f"),
        _number("bytes a replay", "bytes_per_replay", ",.0f"),
        _number("last loss", "loss", ".6f"),
    ]
    return [*grid(*filled(columns, rows)), ""]


def against_lines(rows: Sequence[Row]) -> list[str]:
    """Every configuration against every other, if that says more than the table of steps."""
    timed = [row for row in rows if row.metrics["step"]]
    several = _in_several_rounds(rows)
    # Two configurations of one round are in the table of steps already.
    if len(timed) <= (1 if several else 2):
        return []
    body = [
        [
            row.name,
            *(NONE if row is other else ratio_cell(row.step_ratio(other)) for other in timed),
        ]
        for row in timed
    ]
    how = ": median of the ratios within a round (least to greatest)" if several else ""
    lines = [f"{_AGAINST}{how}:", "", *grid(["step of / to", *(row.name for row in timed)], body)]
    return [*lines, "", *([] if several else [_ONE_ROUND, ""])]


def _in_several_rounds(rows: Sequence[Row]) -> bool:
    """Whether a configuration of this table has, or should have, more than one run."""
    return any(len(row.rounds) > 1 for row in rows)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Notes on which steps the metrics cover."""
    alone = {row.metrics["device_alone"] for row in rows if row.metrics["busy"] is not None}
    steadiness = any(row.metrics["later_per_earlier"] for row in rows)
    notes = {
        baseline_note(rows): True,
        _HALVES: steadiness,
        _TRACED: True in alone,
        _WITH_HOST: False in alone,
    }
    shown = [note for note, is_shown in notes.items() if note and is_shown]
    return [line for note in shown for line in (note, "")]


def _number(title: str, name: str, form: str = ",.1f") -> Column:
    return title, lambda row: number(row.metrics[name], form)


def _traced(title: str, name: str, form: str = ",.1f") -> Column:
    """A metric of the GPU, marked if it is of a slowed host."""

    def cell(row: Row) -> str:
        value = row.metrics[name]
        mark = "" if row.metrics["device_alone"] or value is None else WITH_HOST
        return number(value, form) + mark

    return title, cell


def _ratio(name: str, to: str = "") -> Callable[[Row], str]:
    """The cell with a metric relative to that of the baseline."""

    def cell(row: Row) -> str:
        value = row.ratio(name, to)
        return number(value, ".3f") + ("" if row.same_invocation or value is None else ELSEWHERE)

    return cell


def _medians(row: Row) -> str:
    return ", ".join(number(median) for median in row.metrics["medians"]) or NONE


def _between_quartiles(row: Row) -> str:
    found = row.metrics["quartiles"]
    return number(found[1] - found[0] if found else None, ",.2f")


def _least_to_most(row: Row) -> str:
    least, most = row.metrics["least"], row.metrics["most"]
    return NONE if least is None else f"{least:,.1f} to {most:,.1f}"
