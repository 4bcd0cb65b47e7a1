"""Builds the page section by section: its text, its plots, and what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megatron_cg.tools.report import html, words
from megatron_cg.tools.report import report_plots as plots
from megatron_cg.tools.report.coverage import Coverage, read_coverage
from megatron_cg.tools.report.facts import command_lines, facts
from megatron_cg.tools.report.render import as_svg, write_png
from megatron_cg.tools.report.series import (
    Quantity,
    counted_steps,
    memory_over_steps,
    phase_times,
    quantities,
    step_times,
)
from megatron_cg.tools.report.story import Story
from megatron_cg.version import __version__

MARKS = {"good": "\u2713", "bad": "\u2717", "note": "\u2022"}
_ROWS = 60


@dataclass(frozen=True)
class Plot:
    """A plot of the page, with the name of its PNG file and its caption."""

    name: str
    caption: str
    draw: plots.Draw

    @property
    def html(self) -> str:
        """The plot as HTML; its caption is also the text alternative."""
        return html.figure(as_svg(self.draw, self.name, self.caption), self.caption)


@dataclass(frozen=True)
class Part:
    """A section: ``body`` precedes its plots, ``after`` follows them."""

    name: str
    title: str
    body: str
    figures: tuple[Plot, ...] = ()
    after: str = ""


def page(story: Story) -> str:
    """The whole page as one HTML document that loads nothing."""
    made = parts(story)
    found = words.verdict(story)
    tiles = "".join(
        f"<div><dt>{escape(tile.label)}</dt><dd class='value'>{escape(tile.value)}</dd>"
        f"<dd class='note'>{escape(tile.note)}</dd></div>"
        for tile in words.tiles(story, quantities(story))
    )
    links = "".join(f'<li><a href="#{p.name}">{escape(p.title)}</a></li>' for p in made)
    head = (
        f"<header>\n<h1>{escape(story.title)}</h1>\n"
        + html.paragraph(f"Report of megatron_cg {__version__}: {words.what(story)}.", "muted")
        + f'<div class="verdict {found.kind}"><strong><span aria-hidden="true">'
        f"{MARKS[found.kind]}</span> {escape(found.head)}</strong>{escape(found.text)}</div>\n"
        f'<dl class="tiles">{tiles}</dl>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
    )
    sections = "".join(
        html.section(p.name, p.title, p.body + "".join(f.html for f in p.figures) + p.after)
        for p in made
    )
    return html.document(
        f"{story.title}: report of megatron_cg", f"{head}<main>\n{sections}</main>\n"
    )


def write_pngs(story: Story, directory: Path) -> list[Path]:
    """Write every plot of the page as ``<name>.png`` in ``directory``; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for part in parts(story):
        for plot in part.figures:
            path = directory / f"{plot.name}.png"
            write_png(plot.draw, path)
            written.append(path)
    return written


def parts(story: Story) -> list[Part]:
    """The sections in order."""
    made: tuple[Callable[[Story], Part | None], ...] = (
        _losses,
        _times,
        _coverage,
        _memory,
        _counters,
        _faults,
        _patches,
        _versions,
    )
    return [part for make in made if (part := make(story)) is not None]


def _losses(story: Story) -> Part:
    found = quantities(story)
    figures = tuple(
        Plot(
            f"loss-{number}",
            f"Step by step, {quantity.name} of {_both(story)}. {words.difference(quantity)}"
            f"{_dotted(story)}",
            plots.of_quantity(story, quantity),
        )
        for number, quantity in enumerate(found, 1)
    )
    numbers = html.details("The numbers", _numbers(found)) if found else ""
    body = "" if found else html.paragraph("No step has ended, so there is no loss.")
    return Part("losses", "Losses and gradient norm", body, figures, numbers)


def _both(story: Story) -> str:
    return " and ".join(name for name, _ in story.runs)


def _dotted(story: Story) -> str:
    after = story.captured_after
    return "" if after is None else f" The dotted line is capture, after step {after}."


def _numbers(found: list[Quantity]) -> str:
    """A table of the numbers of steps: all if they are few, else every n-th."""
    steps = sorted({int(step) for quantity in found for step in quantity.run.x})
    stride = -(-len(steps) // _ROWS) if steps else 1
    head, columns = ["step"], []
    for quantity in found:
        for name, series in ((quantity.name, quantity.run), ("difference", quantity.difference)):
            if series is not None:
                head.append(name)
                columns.append(dict(zip(series.x, series.y, strict=True)))
    rows = [[str(step), *(_number(column.get(step)) for column in columns)] for step in steps]
    note = f"Every {stride}th step." if stride > 1 else ""
    return html.table(head, rows[::stride], note)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _times(story: Story) -> Part:
    top, above = plots.highest_shown(story), []
    for name, run in story.runs:
        times = step_times(run[min(run)])
        pairs = zip(times.x, times.y, strict=True)
        above += [f"step {s:.0f} of {name} took {t:.0f} ms" for s, t in pairs if t > top]
    caption = f"Time of each step of {_both(story)}.{_dotted(story)}"
    if above:
        shown = "; ".join(above[:3])
        more = f"; and {len(above) - 3} more" if len(above) > 3 else ""
        caption += f" Above the picture: {shown}{more}."
    figures = [Plot("step-times", caption, plots.of_step_times(story))]
    steps = counted_steps(story)
    phases = {name: phase_times(run[min(run)], steps) for name, run in story.runs}
    phases = {name: found for name, found in phases.items() if found}
    after = ""
    if phases:
        said = "; ".join(
            f"{name}: " + ", ".join(f"{part} {time:.1f} ms" for part, time in found.items())
            for name, found in phases.items()
        )
        caption = f"What the median step consists of. {said}."
        figures.append(Plot("step-phases", caption, plots.of_phases(story, phases)))
    else:
        text = "The parts of a step were not recorded."
        if story.on_gpu:
            text += (
                " Megatron measures them with --timing-log-level 1 or 2, which makes it wait for "
                "the GPU between them."
            )
        after = html.paragraph(text, "muted")
    captures = list(_captures(story))
    for number, capture in enumerate(captures, 1):
        seconds = capture["seconds"]
        which = f" {number}" if len(captures) > 1 else ""
        caption = (
            f"Capture{which}, after step {capture['after_step']}: "
            f"{capture['graphs']} graphs of {capture['layers']} layers in "
            f"{sum(seconds.values()):.2f} s of the host's time."
        )
        name = f"capture-seconds{'-' + str(number) if len(captures) > 1 else ''}"
        figures.append(Plot(name, caption, plots.of_capture_seconds(seconds)))
    body = html.paragraph(words.speed(story))
    return Part("times", "Time of steps and of capture", body, tuple(figures), after)


def _captures(story: Story) -> Iterator[Mapping[str, Any]]:
    """Captures that produced graphs; if there are many, the first and the last."""
    found = story.captures
    yield from found if len(found) <= 2 else (found[0], found[-1])


def _coverage(story: Story) -> Part:
    found, title = read_coverage(story), "What was graphed"
    if found is None:
        text = "No graph was captured." if not words.counts(story.run) else (
            "Graphs were captured; which layers they hold was not recorded."
        )  # fmt: skip
        return Part("graphed", title, html.paragraph(text))
    plot = Plot("coverage", f"Layers and their parts. {found.text}", plots.of_coverage(found))
    return Part("graphed", title, "", (plot,), _reasons(found))


def _reasons(found: Coverage) -> str:
    rows = [
        [
            name,
            layer.kind,
            ", ".join(layer.graphed) or "nothing",
            "; ".join(f"{', '.join(scopes)}: {why}" for why, scopes in layer.reasons.items())
            or "nothing",
        ]
        for name, layer in found.groups
    ]
    return html.table(["layers", "class", "in a graph", "eager, and why"], rows)


def _memory(story: Story) -> Part:
    title = "GPU memory"
    if not any(memory_over_steps(r[min(r)], "allocated_bytes").x for _, r in story.runs):
        text = "Memory was not recorded." if story.on_gpu else "No GPU was used, so there is none."
        return Part("memory", title, html.paragraph(text))
    body = html.paragraph(words.peaks(story))
    caption = "Memory after each step, of the first rank: held by tensors and graphs (allocated), "
    caption += f"and with what the allocator keeps for later (reserved).{_dotted(story)}"
    figures = [Plot("memory-steps", caption, plots.of_memory_over_steps(story))]
    for capture in list(_captures(story))[:1]:
        points = {name: values for name, values in capture["memory"].items() if values}
        if points:
            exact = points.get("highest", {}).get("exact")
            seen = "exact" if exact else "as seen between passes; the run had had more before"
            caption = f"Memory around capture, first rank. The highest is {seen}."
            order = ("before", "warmed up", "highest", "captured", "after")
            points = {name: points[name] for name in order if name in points}
            figures.append(Plot("memory-capture", caption, plots.of_memory_at_capture(points)))
    return Part("memory", title, body, tuple(figures))


def _counters(story: Story) -> Part:
    title, total = "Counters", words.counts(story.run)
    if not total:
        return Part("counters", title, html.paragraph("The run had no graphs to count."))
    shown = [[name.replace("_", " "), _whole(name, value)] for name, value in total.items()]
    after = html.table(["count", "all ranks"], shown)
    if not story.rank.get("intervals"):
        text = "How they grew from step to step was not recorded."
        return Part("counters", title, html.paragraph(text), (), after)
    caption = (
        "What graphs did in each step, on the first rank: passes of layers that were replays, "
        "eager instead, not allowed by a guard, or verified; bytes copied into graphs; and what "
        f"the ranks' votes took. A point is the mean since the one before.{_dotted(story)}"
    )
    figure = Plot("counters", caption, plots.of_counters(story))
    return Part("counters", title, "", (figure,), after)


def _whole(name: str, value: int) -> str:
    if name == "bytes_copied":
        return f"{value:,} ({value / plots.MIB:.1f} MiB)"
    if name == "guard_ns":
        return f"{value:,} ({value / 1e6:.1f} ms)"
    return f"{value:,}"


def _faults(story: Story) -> Part:
    lines = words.faults(story)
    mismatched = words.counts(story.run).get("mismatched", 0)
    if lines:
        body = html.bullets(lines)
    elif mismatched:
        body = html.paragraph(
            f"{words.count(mismatched, 'mismatch', 'mismatches')}; the texts were not recorded, "
            "and the run's log has them."
        )
    else:
        body = html.paragraph("None: no guard forbade a replay, no capture failed, nothing raised.")
    return Part("faults", "Mismatches and faults", body)


def _patches(story: Story) -> Part | None:
    """What the last capture left changed in other packages; None where nothing is recorded."""
    changes = story.captures[-1].get("patches", []) if story.captures else []
    if not changes:
        return None
    rows = [[change["place"], change["value"], str(change["objects"])] for change in changes]
    table = html.table(["place", "value while graphs live", "objects"], rows)
    body = html.paragraph(
        "Closing the graphs restores each place, in reverse order, unless other code has changed "
        "it since."
    )
    title = "Changes in other packages"
    return Part("patches", title, body + html.details(f"{len(rows)} places", table))


def _versions(story: Story) -> Part:
    rows = facts(story)
    differ = [row for row in rows if len(set(row[1:])) > 1]
    body = ""
    if story.reference is None:
        body += html.table(["what", "value"], rows)
    else:
        if differ:
            names = (name for name, _ in story.runs)
            body += html.table(["what", *names], differ, "Different in the two runs")
        same = [row[:2] for row in rows if row not in differ]
        body += html.table(["what", "both runs"], same, "The same in both runs")
    body += html.details("Command lines", command_lines(story))
    return Part("versions", "Versions, machine and flags", body)
