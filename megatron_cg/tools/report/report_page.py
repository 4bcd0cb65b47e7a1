"""Computes what ``report.html`` shows of a run or of two, and writes the plots as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_cg.tools.align.compare import FAILED
from megatron_cg.tools.pages import bars
from megatron_cg.tools.pages.columns import own_words, parted
from megatron_cg.tools.pages.figures import Plot, write_png
from megatron_cg.tools.pages.templates import render
from megatron_cg.tools.report import report_plots as draw
from megatron_cg.tools.report import words
from megatron_cg.tools.report.coverage import read_coverage
from megatron_cg.tools.report.facts import facts
from megatron_cg.tools.report.series import (
    MIB,
    Quantity,
    counted_steps,
    memory_over_steps,
    phase_times,
    quantities,
    step_times,
)
from megatron_cg.tools.report.story import Story

_ROWS = 60
"""Maximum number of rows in a table of steps."""
_SHOWN = 20
"""Maximum number of rows in a table of differences."""
_POINTS = ("before", "warmed up", "highest", "captured", "after")
"""Points of a capture at which memory is recorded, in order."""


def page(story: Story) -> str:
    """The whole page as one HTML document that loads nothing."""
    found = quantities(story)
    return render(
        "report/report.html",
        story=story,
        words=words,
        plots=plots(story, found),
        quantities=found,
        different=_different(story),
        numbers=_numbers(found),
        long_steps=_long_steps(story),
        phases=_phases(story),
        captures=_captures(story),
        coverage=read_coverage(story),
        memory_points=_memory_points(story),
        patches=_patches(story),
        facts=parted(facts(story)),
        commands=own_words({name: record.get("command") or () for name, record in story.records}),
    )


def write_pngs(story: Story, directory: Path) -> list[Path]:
    """Write every plot of the page as ``<name>.png`` in ``directory``; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots(story, quantities(story)).values():
        written.append(directory / f"{plot.name}.png")
        write_png(plot.draw, written[-1])
    return written


def plots(story: Story, found: Sequence[Quantity]) -> dict[str, Plot]:
    """The plots for which there is something to draw, by name, in the order of the page."""
    drawn = {
        f"loss-{number}": draw.of_quantity(story, quantity)
        for number, quantity in enumerate(found, 1)
    }
    if story.rank["steps"]:
        drawn["step-times"] = draw.of_step_times(story)
    if phases := _phases(story):
        drawn["step-phases"] = bars.stacked(phases, "milliseconds")
    for name, capture in _captures(story).items():
        seconds = {phase: {"host": value} for phase, value in capture["seconds"].items()}
        drawn[name] = bars.side_by_side(seconds, "seconds", "%.2f s")
    if coverage := read_coverage(story):
        drawn["coverage"] = draw.of_coverage(coverage)
    if any(memory_over_steps(record, "allocated_bytes") for _, record in story.records):
        drawn["memory-steps"] = draw.of_memory_over_steps(story)
        if points := _memory_points(story):
            keys = {"allocated": "allocated_bytes", "reserved": "reserved_bytes"}
            mib = {
                point: {name: memory[key] / MIB for name, key in keys.items() if key in memory}
                for point, memory in points.items()
            }
            drawn["memory-capture"] = bars.side_by_side(mib, "MiB")
    if words.counts(story.run) and story.rank.get("intervals"):
        drawn["counters"] = draw.of_counters(story)
    return {name: Plot(name, function) for name, function in drawn.items()}


def _different(story: Story) -> dict[str, Any]:
    """The first numbers and parameter shards that are not equal, and how many there are."""
    comparison, values = story.comparison, story.values
    shards = comparison.different_shards if comparison else ()
    unequal = [value for value in values if not value.same]
    if comparison is not None and comparison.status == FAILED:
        # Where a run failed, it lacks every later number, and the verdict says so.
        unequal = [value for value in unequal if None not in (value.eager, value.graphed)]
    rows = [
        [
            *(f"{value.step}", f"{value.rank}", value.name),
            *(_exact(value.eager), _exact(value.graphed)),
            f"{value.difference:.3e}",
        ]
        for value in unequal[:_SHOWN]
    ]
    return {
        "numbers": rows,
        "numbers_note": _first(len(unequal), f"of {len(values)} numbers"),
        "shards": [[shard] for shard in shards[:_SHOWN]],
        "shards_note": _first(len(shards), "parameter shards at the end"),
    }


def _exact(text: str | None) -> str:
    return "none" if text is None else repr(float.fromhex(text))


def _first(count: int, what: str) -> str:
    return f"{count} {what}" + (f", of which these are the first {_SHOWN}" * (count > _SHOWN))


def _numbers(found: list[Quantity]) -> tuple[list[str], list[list[str]], str]:
    """Head, rows and caption of the numbers of steps: all if they are few, else every n-th."""
    steps = sorted({step for quantity in found for step in quantity.run})
    stride = -(-len(steps) // _ROWS) or 1
    head, columns = ["step"], []
    for quantity in found:
        for name, curve in ((quantity.name, quantity.run), ("difference", quantity.difference)):
            if curve is not None:
                head.append(name)
                columns.append(curve)
    rows = [
        [str(step), *(f"{column[step]:.9g}" if step in column else "none" for column in columns)]
        for step in steps[::stride]
    ]
    return head, rows, f"Every {stride}th step." if stride > 1 else ""


def _long_steps(story: Story) -> list[str]:
    """The steps that are above the plot of step times."""
    top, found = draw.highest_shown(story), []
    for name, record in story.records:
        times = step_times(record).items()
        found += [f"step {step} of {name} took {time:.0f} ms" for step, time in times if time > top]
    return found


def _phases(story: Story) -> dict[str, dict[str, float]]:
    """Milliseconds of the median step by run and phase; only runs that recorded phases."""
    steps = counted_steps(story)
    found = {name: phase_times(record, steps) for name, record in story.records}
    return {name: times for name, times in found.items() if times}


def _captures(story: Story) -> dict[str, Mapping[str, Any]]:
    """Captures that produced graphs, by the name of the plot; of many the first and the last."""
    made = story.captures
    if len(made) == 1:
        return {"capture-seconds": made[0]}
    shown = made if len(made) <= 2 else [made[0], made[-1]]
    return {f"capture-seconds-{number}": capture for number, capture in enumerate(shown, 1)}


def _memory_points(story: Story) -> dict[str, Mapping[str, Any]]:
    """Memory at the points of the first capture, where it was recorded."""
    memory = story.captures[0]["memory"] if story.captures else {}
    return {name: memory[name] for name in _POINTS if memory.get(name)}


def _patches(story: Story) -> list[list[str]]:
    """What the last capture left changed in other packages, if that was recorded."""
    changes = story.captures[-1].get("patches", []) if story.captures else []
    return [[change["place"], change["value"], str(change["objects"])] for change in changes]
