"""Cells and columns that several tables have: configurations, their troubles, and ratios. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_cg.tools.bench.results.grids import NONE, number
from megatron_cg.tools.bench.results.metrics import Row, has_other_baselines
from megatron_cg.tools.bench.results.rounds import Ratio
from megatron_cg.tools.bench.runs.configurations import EAGER
from megatron_cg.tools.bench.runs.store import OK, Result, round_of

ELSEWHERE = " \u2020"
"""Marks the ratio of runs that were not made side by side."""
Column = tuple[str, Callable[[Row], str]]
"""The title of a column, and the cell of a row."""


def heading(result: Result) -> str:
    """The shape and size of a table."""
    key = result["key"]
    size = f"{key['layers']} layers, {key['microbatches']} microbatches, {key['nproc']} processes"
    gemm = f", grouped GEMM {key['grouped_gemm']}"
    grown = f" (scaling by {key['dimension']})" if key["dimension"] else ""
    return f"{key['shape']}: {size}{gemm}{grown}"


def ratio_cell(found: Ratio | None) -> str:
    """The median of the rounds' ratios; with several rounds also the smallest and the largest."""
    if found is None:
        return NONE
    text = number(found.median, ".3f")
    if found.least < found.most:
        text += f" ({found.least:.3f} to {found.most:.3f})"
    return text + ("" if found.side_by_side else ELSEWHERE)


def baseline_title(rows: Iterable[Row]) -> str:
    """The title of a column of ratios to the baseline."""
    return "/ baseline" if has_other_baselines(rows) else f"/ {EAGER}"


def step_ratios(rows: Iterable[Row], *, to_itself: str = "") -> list[Column]:
    """The ratios of steps: to the baseline, and to fsdp-eager where that is another.

    Args:
        rows: of the table.
        to_itself: what stands there for a baseline; its ratio if empty.
    """

    def cell(row: Row, base: Row | None) -> str:
        return to_itself if to_itself and row is base else ratio_cell(row.step_ratio(base))

    columns: list[Column] = [(baseline_title(rows), lambda row: cell(row, row.baseline))]
    if has_other_baselines(rows):
        columns.append((f"/ {EAGER}", lambda row: cell(row, row.table.get(EAGER))))
    return columns


def baseline_note(rows: Sequence[Row]) -> str:
    """Which configurations are compared with which, if not all with fsdp-eager."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row.baseline_name, []).append(row.name)
    others = [
        f"for {' and '.join(names)} it is the ratio to {name}"
        for name, names in groups.items()
        if name != EAGER
    ]
    return f'"/ baseline" is the ratio to {EAGER}; {"; ".join(others)}.' if others else ""


def status_label(row: Row) -> str:
    """The configuration, with its errors and their rounds."""
    wrong = dict.fromkeys(words for words, _ in _troubles(row))
    return f"{row.name} ({'; '.join(wrong)})" if wrong else row.name


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """Why runs failed or were skipped, and other notes on them."""
    lines: list[str] = []
    for row in rows:
        for words, result in _troubles(row):
            lines += [f"{row.name} {words}: {result['error']}", ""]
            if result["tail"]:
                lines += ["```", *result["tail"][-12:], "```", ""]
        notes = dict.fromkeys(note for result in row.rounds for note in result["notes"])
        lines += [line for note in notes for line in (f"{row.name}: {note}", "")]
    return lines


def _troubles(row: Row) -> list[tuple[str, Result]]:
    """Failed and skipped runs by reason: status and rounds in words, and the first of them."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in row.rounds:
        if result["status"] != OK:
            groups.setdefault((result["status"], result["error"]), []).append(result)
    found = []
    for (status, _), members in groups.items():
        rounds = ", ".join(str(round_of(result["key"])) for result in members)
        where = f" in round{'s' if len(members) > 1 else ''} {rounds}"
        found.append((status if len(members) == len(row.rounds) else status + where, members[0]))
    return found
