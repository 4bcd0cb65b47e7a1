"""Computes what ``report.html`` shows of a run or of two."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_cg.telemetry.coverage import NO_SUCH_PART
from megatron_cg.tools.align.compare import FAILED
from megatron_cg.tools.report import plots, words
from megatron_cg.tools.report.series import memory_over_steps, quantities, step_times
from megatron_cg.tools.report.story import Story
from megatron_cg.version import __version__

_SHOWN = 20
"""Maximum number of rows in a table of differences."""


def page(story: Story) -> str:
    """The whole page as one HTML document that loads nothing."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    found, top = quantities(story), plots.highest_shown(story)
    with_memory = any(memory_over_steps(record, "allocated_bytes") for _, record in story.records)
    return environment.get_template("report.html").render(
        story=story,
        words=words,
        version=__version__,
        names=[name for name, _ in story.runs],
        losses=[(q, plots.plotted(partial(plots.losses, story=story, quantity=q))) for q in found],
        times=plots.plotted(partial(plots.times, story=story)) if found else None,
        above=sum(
            time > top for _, record in story.records for time in step_times(record).values()
        ),
        memory=plots.plotted(partial(plots.memory, story=story)) if with_memory else None,
        numbers=_numbers(story),
        shards=[[shard] for shard in story.comparison.different_shards] if story.comparison else [],
        shown=_SHOWN,
        captures=[*story.captures[:1], *story.captures[1:][-1:]],
        coverage=list(_coverage(story)),
        facts=_facts(story),
        commands={n: shlex.join(record.get("command") or ()) for n, record in story.records},
    )


def _numbers(story: Story) -> list[list[str]]:
    """The numbers that are not equal: step, rank, name, both values, difference."""
    unequal = [value for value in story.values if not value.same]
    if story.comparison is not None and story.comparison.status == FAILED:
        # Where a run failed, it lacks every later number, and the verdict says so.
        unequal = [value for value in unequal if None not in (value.eager, value.graphed)]
    return [
        [
            *(str(value.step), str(value.rank), value.name),
            *(
                "none" if text is None else repr(float.fromhex(text))
                for text in (value.eager, value.graphed)
            ),
            f"{value.difference:.3e}",
        ]
        for value in unequal
    ]


def _coverage(story: Story) -> Iterator[list[str]]:
    """For equal neighbouring layers: their names, class, scopes in a graph, the others and why."""
    rows = story.captures[-1]["coverage"] if story.captures else ()
    for _, group in groupby(rows, lambda row: (row["kind"], row["graphed"], row["eager"])):
        first, *others = group
        last = f" to {others[-1]['name'].rpartition(' ')[2]}" if others else ""
        reasons: dict[str, list[str]] = {}
        for scope, reason in first["eager"].items():
            if reason != NO_SUCH_PART:
                reasons.setdefault(reason, []).append(scope)
        eager = "; ".join(f"{', '.join(scopes)}: {why}" for why, scopes in reasons.items())
        graphed = ", ".join(first["graphed"]) or "nothing"
        yield [first["name"] + last, first["kind"], graphed, eager or "nothing"]


def _facts(story: Story) -> list[list[str]]:
    """Versions, machine and environment: a name and the value in each run, what differs first."""
    parts = ("versions", "environment")
    columns = [
        {"device": record.get("device"), "scopes in graphs": _scopes(record)}
        | {name: value for part in parts for name, value in record.get(part, {}).items()}
        for _, record in story.records
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(str(column.get(name, "none")) for column in columns)] for name in names]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1)


def _scopes(record: Mapping[str, Any]) -> str:
    """The scopes in the last capture, each with the number of layers whose graph has it."""
    made = [capture for capture in record.get("captures", ()) if capture["graphs"]]
    rows = made[-1]["coverage"] if made else ()
    layers = Counter(scope for row in rows for scope in row["graphed"])
    return ", ".join(f"{scope} of {number} layers" for scope, number in layers.items()) or "none"
