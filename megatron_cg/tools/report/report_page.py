"""One page of a run or of two: their records, sentences, tables and plots.

Plots are PNG files inside the page, made with matplotlib, on white in light and dark.
"""

import base64
import io
import math
import shlex
import statistics
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_cg.files import whole_file
from megatron_cg.tools.align import compare as align
from megatron_cg.tools.align.run import EAGER, GRAPHS
from megatron_cg.tools.record import read_record
from megatron_cg.version import __version__

MIB = 2**20
_WORK = (
    "On all ranks {captured:,} graphs were captured. Of their passes {replayed:,} were replays, "
    "{eager:,} eager instead, {mismatched:,} not allowed by a guard, {verified:,} verified with "
    "gradients, {outputs_only:,} in outputs only."
)
Curve = dict[int, float]
"""A number at each step, from 1, in the order of steps."""
_RUN, _REFERENCE, _MUTED = "#0072b2", "#c05200", "#525b66"
_STYLE: Any = {
    "agg.path.chunksize": 10_000,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#d5dae0",
    "text.parse_math": False,
}


def invoke(args: Namespace, _extra: Sequence[str]) -> int:
    try:
        text = page(read_story(args.directory, args.against))
    except (*read_record.UNREADABLE, TemplateError) as error:
        what = f"{args.directory} holds a record with values that no run writes"
        raise read_record.RecordError(f"{what}: {read_record.of_damage(error)}.") from error
    out = args.out or args.directory / "report.html"
    with whole_file(out) as part:
        part.write_text(text, encoding="utf-8")
    print(f"written: {out}")
    return 0


@dataclass(frozen=True)
class Story:
    title: str
    runs: Mapping[str, align.Run]
    """By name. The last is the page's run; one before it is the reference, as an eager run is."""

    @property
    def name(self) -> str:
        return list(self.runs)[-1]

    @property
    def run(self) -> align.Run:
        return self.runs[self.name]

    @cached_property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """The record of each run's first rank, by name; curves are drawn from them."""
        return {name: run[min(run)] for name, run in self.runs.items()}

    @property
    def rank(self) -> Mapping[str, Any]:
        return self.records[self.name]

    @cached_property
    def comparison(self) -> align.Comparison | None:
        """Both runs' numbers bit for bit, by the rules of ``megatron-cg align``."""
        return align.compare(*self.runs.values()) if len(self.runs) > 1 else None

    @property
    def captured_after(self) -> int | None:
        return read_record.captured_after(self.rank)

    @property
    def on_gpu(self) -> bool:
        return bool(self.rank.get("device", "cpu") != "cpu")


def losses(story: Story) -> dict[str, dict[str, Curve]]:
    """Losses and gradient norm by name, then by run, of those that the page's run has."""
    curves: dict[str, dict[str, Curve]] = {}
    for run, record in story.records.items():
        for index in range(len(record["steps"])):
            for name, text in align.numbers_of(record["steps"], index).items():
                found = curves.setdefault(name, {}).setdefault(run, {})
                found[index + 1] = float.fromhex(text)
    return {name: found for name, found in curves.items() if story.name in found}


def step_times(story: Story) -> dict[str, Curve]:
    return {
        name: {number: float(s["milliseconds"]) for number, s in enumerate(record["steps"], 1)}
        for name, record in story.records.items()
    }


def counted_steps(story: Story) -> range:
    """The steps, from 1, whose times are compared: those with graphs, except the first.

    Without graphs the second half, because the first half contains one-time work.
    """
    steps = min(len(record["steps"]) for record in story.records.values())
    captured = story.captured_after
    return range(steps // 2 + 1 if captured is None else captured + 2, steps + 1)


def median_times(story: Story) -> dict[str, float]:
    steps = counted_steps(story)
    return {
        name: statistics.median(curve[step] for step in steps)
        for name, curve in step_times(story).items()
        if steps
    }


def read_story(directory: Path, against: Path | None = None) -> Story:
    """The runs in ``directory``, as written by ``align`` or ``--cg-report``.

    It contains one run's ``rank0.jsonl``, or a ``record`` with it, or ``eager`` and ``graphs``, as
    align leaves them. ``against`` is another folder of one run, the reference. Raises RecordError
    if there is no record.
    """
    title = _title(directory)
    if against is not None:
        names = _title(against), title
        if names[0] == names[1]:
            names = str(against), str(directory)
        runs = dict(zip(names, map(_read, (against, directory)), strict=True))
        return Story(" against ".join(reversed(names)), runs)
    pair = [directory / name for name in (EAGER, GRAPHS)]
    if all(map(_records, pair)):
        return Story(title, {place.name: _read(place) for place in pair})
    return Story(title, {title: _read(directory)})


def _records(directory: Path) -> Path | None:
    there = (place for place in (directory, directory / "record") if place.is_dir())
    return next((place for place in there if read_record.record_files(place)), None)


def _read(directory: Path) -> align.Run:
    return read_record.read_run(_records(directory) or directory)


def _title(directory: Path) -> str:
    place = directory.resolve()
    return place.parent.name if place.name == "record" else place.name


def page(story: Story) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    total, medians = Counter(align.graph_counts(story.run)), median_times(story)
    captures = [capture for capture in story.rank.get("captures", ()) if capture["graphs"]]
    where = str(story.rank.get("device", "cpu")) if story.on_gpu else "no GPU"
    # The first step and the capture take many times as long as the others.
    top = 2 * max(medians.values()) if medians else None
    return environment.get_template("report.html").render(
        story=story,
        title=", ".join(filter(None, [story.title, story.rank.get("began", "")[:10]])),
        about=f"{len(story.run)} ranks, {where}",
        version=__version__,
        verdict=verdict(story),
        faults=faults(story),
        losses={name: plotted(story, name, curves) for name, curves in losses(story).items()},
        times=plotted(story, "milliseconds", step_times(story), top)
        if story.rank["steps"]
        else None,
        speed=speed(story),
        peaks=peaks(story) if story.on_gpu and story.rank["steps"] else "",
        work=_WORK.format_map(total) if total["captured"] or captures else "",
        captures=captures,
        facts=_facts(story),
        commands={n: shlex.join(rank.get("command") or ()) for n, rank in story.records.items()},
    )


def _facts(story: Story) -> list[list[str]]:
    """Versions, machine and environment: a name and the value in each run, what differs first."""
    columns = [
        {"device": record.get("device")}
        | record.get("versions", {})
        | record.get("environment", {})
        for record in story.records.values()
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(str(column.get(name, "none")) for column in columns)] for name in names]
    return sorted(rows, key=lambda row: len(set(row[1:])) == 1)


class Verdict(NamedTuple):
    kind: Literal["good", "bad", "note"]
    head: str
    text: str


def verdict(story: Story) -> Verdict:
    comparison = story.comparison
    if comparison is None:
        return _outcome(story)
    unequal = sum(not value.same for value in comparison.values)
    numbers = f"{len(comparison.values)} losses and gradient norms"
    why = comparison.reason
    if comparison.status == align.IDENTICAL:
        text = f"All {numbers} and {comparison.shards} parameter shards have the same bits."
        return Verdict("good", "Identical, to the last bit", text)
    if comparison.status == align.DIFFERENT or unequal:
        return Verdict("bad", "Different", f"{unequal} of {numbers} differ: {why}.")
    if comparison.status == align.FAILED:
        return Verdict("note", "Not shown to be equal", f"No number differs, but {why}.")
    return Verdict("note", "Not comparable", f"{why}.")


def _outcome(story: Story) -> Verdict:
    steps = f"{len(story.rank['steps'])} steps are recorded"
    if any(record["error"] for record in story.run.values()):
        return Verdict("bad", "The run failed", f"{steps}.")
    if missing := align.missing_ranks(story.run):
        return Verdict("note", "Some ranks are missing", f"{steps}. The run has {missing}.")
    if not all(record["finished"] for record in story.run.values()):
        return Verdict("note", "Not ended", f"{steps}: the run is still going, or was killed.")
    return Verdict("note", "Trained to its end", f"{steps}. There is no run to compare it with.")


def speed(story: Story) -> str:
    medians, steps = median_times(story), counted_steps(story)
    if not medians:
        return "No step is left to compute a time from."
    text = f"Median step: {_compared(medians, 'ms', '.1f')}"
    text += f" (steps {steps.start} to {steps.stop - 1}, rank {min(story.run)})."
    return text if story.on_gpu else f"{text} No GPU was used: times mean nothing for a GPU."


def peaks(story: Story) -> str:
    highest = {
        name: max(int(record.get("peak_allocated_bytes", 0)) for record in run.values()) / MIB
        for name, run in story.runs.items()
    }
    return f"Highest allocated, of the rank that had most: {_compared(highest, 'MiB', '.0f')}."


def _compared(numbers: Mapping[str, float], unit: str, form: str) -> str:
    text = ", ".join(f"{name} {number:{form}} {unit}" for name, number in numbers.items())
    first, *others = numbers.values()
    return f"{text}, a ratio of {others[0] / first:.3f}" if others and first else text


def faults(story: Story) -> list[str]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for name, run in story.runs.items():
        for rank in sorted(run):
            for text in _faults_of(run[rank]):
                ranks.setdefault((name, text), []).append(rank)
    return [
        f"{name}, rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}: {text}"
        for (name, text), found in ranks.items()
    ]


def _faults_of(record: Mapping[str, Any]) -> Iterator[str]:
    for event in record.get("events", ()):
        yield f"after step {event['after_step']}, {event['level']}: {event['text']}"
    for capture in record.get("captures", ()):
        if capture["error"]:
            yield f"after step {capture['after_step']}, capture failed: {capture['error']}"
    if record["error"]:
        yield f"ended with {record['error']}"


def plotted(story: Story, name: str, curves: Mapping[str, Curve], top: float | None = None) -> str:
    """A plot of one curve a run, from 0 to ``top`` if that is given, as the address of an image."""
    # Not of pyplot, which would keep each figure. A font may lack a glyph of a name.
    with mpl.rc_context(_STYLE), warnings.catch_warnings(action="ignore"):
        figure = Figure((7.4, 2.65), layout="constrained")
        axes = figure.subplots()
        for run, curve in curves.items():
            # The run is a thin line inside the reference's band.
            colour, wide = (_RUN, 1.4) if run == story.name else (_REFERENCE, 6)
            marker = "o" if len(curve) <= 40 else ""
            # matplotlib hides names that begin with an underscore.
            label = run.lstrip("_")[-30:] or "run"
            # Its arithmetic overflows near the largest numbers.
            heights = [height if abs(height) < 1e100 else math.nan for height in curve.values()]
            (line,) = axes.plot(list(curve), heights, color=colour, linewidth=wide, label=label)
            line.set(marker=marker, markersize=3.5)
        axes.set(xlabel="step", ylabel=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        if top is not None:
            axes.set_ylim(0, top)
        if (captured := story.captured_after) is not None:
            axes.axvline(captured + 0.5, color=_MUTED, linewidth=1, linestyle=":")
        return "data:image/png;base64," + base64.b64encode(png(figure)).decode()


def png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=160, metadata={"Software": None})
    return written.getvalue()
