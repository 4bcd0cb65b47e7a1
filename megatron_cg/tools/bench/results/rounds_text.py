"""Formats the rounds for a table of the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_cg.tools.bench.results.grids import NONE, grid, number
from megatron_cg.tools.bench.results.metrics import Row, has_other_baselines
from megatron_cg.tools.bench.results.rounds import Ratio
from megatron_cg.tools.bench.runs.bench_schedule import round_of
from megatron_cg.tools.bench.runs.configurations import EAGER
from megatron_cg.tools.bench.runs.store import OK, Result

ELSEWHERE = " \u2020"
"""Marks the ratio of runs that were not made side by side."""
_AGAINST = "Steps against each other, row / column"
_ONE_ROUND = (
    "One round: a machine may drift by 10% and more within minutes, and `--rounds` tells smaller "
    "differences from that."
)


def in_several_rounds(rows: Sequence[Row]) -> bool:
    """Whether a configuration of this table has, or should have, more than one run."""
    return any(len(row.rounds) > 1 for row in rows)


def medians_cell(row: Row) -> str:
    """The median step time of each round."""
    return ", ".join(number(median) for median in row.metrics.medians) or NONE


def ratio_cell(found: Ratio | None) -> str:
    """The median of the rounds' ratios; with several rounds also the smallest and the largest."""
    if found is None:
        return NONE
    text = number(found.median, ".3f")
    if found.least < found.most:
        text += f" ({found.least:.3f} to {found.most:.3f})"
    return text + ("" if found.side_by_side else ELSEWHERE)


def ratio_titles(rows: Iterable[Row]) -> list[str]:
    """The columns of ratios of steps: to the baseline, and to fsdp-eager where that is another."""
    return ["/ baseline", f"/ {EAGER}"] if has_other_baselines(rows) else [f"/ {EAGER}"]


def ratio_bases(row: Row) -> list[Row | None]:
    """What the ratios in these columns are to."""
    return [row.baseline, row.eager] if has_other_baselines(row.table.values()) else [row.eager]


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


def has_ratios_from_elsewhere(rows: Sequence[Row]) -> bool:
    """Whether this table has a ratio of runs that were not made side by side."""
    if any(row.baseline is not None and not row.same_invocation for row in rows):
        return True
    timed = _timed(rows)
    return _is_shown(rows) and len({row.result["invocation"] for row in timed}) > 1


def against_lines(rows: Sequence[Row]) -> list[str]:
    """Every configuration against every other, if that says more than the table of steps."""
    if not _is_shown(rows):
        return []
    timed = _timed(rows)
    body = [
        [
            row.name,
            *(NONE if row is other else ratio_cell(row.step_ratio(other)) for other in timed),
        ]
        for row in timed
    ]
    several = in_several_rounds(rows)
    how = "median of the ratios within a round (least to greatest)"
    title = f"{_AGAINST}: {how}:" if several else f"{_AGAINST}:"
    lines = [title, "", *grid(["step of / to", *(row.name for row in timed)], body), ""]
    if not several:
        lines += [_ONE_ROUND, ""]
    return lines


def status_label(row: Row) -> str:
    """The configuration, with its errors and their rounds."""
    wrong = [f"{status}{where}" for status, _, where in _troubles(row)]
    return f"{row.name} ({'; '.join(dict.fromkeys(wrong))})" if wrong else row.name


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """Why runs failed or were skipped, and other notes on them."""
    lines: list[str] = []
    for row in rows:
        for status, members, where in _troubles(row):
            lines += [f"{row.name} {status}{where}: {members[0]['error']}", ""]
            if members[0]["tail"]:
                lines += ["```", *members[0]["tail"][-12:], "```", ""]
        notes = dict.fromkeys(note for result in row.rounds for note in result["notes"])
        lines += [line for note in notes for line in (f"{row.name}: {note}", "")]
    return lines


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.metrics.step]


def _is_shown(rows: Sequence[Row]) -> bool:
    """Two configurations of one round are in the table of steps already."""
    return len(_timed(rows)) > (1 if in_several_rounds(rows) else 2)


def _troubles(row: Row) -> list[tuple[str, list[Result], str]]:
    """Status, results and rounds in words of all failed or skipped runs, by reason."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in row.rounds:
        if result["status"] != OK:
            groups.setdefault((result["status"], result["error"]), []).append(result)
    return [(status, members, _where(row, members)) for (status, _), members in groups.items()]


def _where(row: Row, members: Sequence[Result]) -> str:
    """The rounds of ``members``; empty if they are all rounds."""
    if len(members) == len(row.rounds):
        return ""
    numbers = ", ".join(str(round_of(result["key"])) for result in members)
    return f" in round{'s' if len(members) > 1 else ''} {numbers}"
