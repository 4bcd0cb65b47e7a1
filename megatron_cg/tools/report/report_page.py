"""Computes what ``report.html`` shows of a run or of two: its sentences and tables."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_cg.tools.align.compare import (
    DIFFERENT,
    FAILED,
    IDENTICAL,
    graph_counts,
    missing_ranks,
)
from megatron_cg.tools.report.plots import plotted
from megatron_cg.tools.report.story import (
    MIB,
    Quantity,
    Story,
    counted_steps,
    losses,
    median_times,
    memory,
    step_times,
    width,
)
from megatron_cg.version import __version__


def page(story: Story) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    total, used, medians = graph_counts(story.run), memory(story), median_times(story)
    where = str(story.rank.get("device", "cpu")) if story.on_gpu else "no GPU"
    # The first step and the capture take many times as long as the others.
    top = 2 * max(medians.values()) if medians else None
    most = max((max(curve.values()) for curve in used.curves.values()), default=0.0)
    return environment.get_template("report.html").render(
        story=story,
        title=", ".join(filter(None, [story.title, story.rank.get("began", "")[:10]])),
        about=f"{len(story.run)} ranks, {where}",
        version=__version__,
        verdict=verdict(story),
        faults=faults(story),
        losses=[(f"{q.name}. {difference(q)}", plotted(story, q)) for q in losses(story)],
        times=plotted(story, step_times(story), top) if story.rank["steps"] else None,
        speed=speed(story),
        memory=plotted(story, used, 1.1 * most) if used.curves else None,
        peaks=peaks(story),
        work=_work(total) if total.get("captured") or story.captures else "",
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
    """``head`` is a short form, ``text`` the full one; ``kind`` decides how it is shown."""

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
    if comparison.status == IDENTICAL:
        text = f"All {numbers} and {comparison.shards} parameter shards have the same bits."
        return Verdict("good", "Identical, to the last bit", text)
    if comparison.status == DIFFERENT or unequal:
        return Verdict("bad", "Different", f"{unequal} of {numbers} differ: {why}.")
    if comparison.status == FAILED:
        return Verdict("note", "Not shown to be equal", f"No number differs, but {why}.")
    return Verdict("note", "Not comparable", f"{why}.")


def _outcome(story: Story) -> Verdict:
    """A single run's. Its errors are among the faults."""
    steps = f"{len(story.rank['steps'])} steps are recorded"
    if any(record["error"] for record in story.run.values()):
        return Verdict("bad", "The run failed", f"{steps}.")
    if missing := missing_ranks(story.run):
        return Verdict("note", "Some ranks are missing", f"{steps}. The run has {missing}.")
    if not all(record["finished"] for record in story.run.values()):
        return Verdict("note", "Not ended", f"{steps}: the run is still going, or was killed.")
    return Verdict("note", "Trained to its end", f"{steps}. There is no run to compare it with.")


def difference(quantity: Quantity) -> str:
    """How two runs differ in one quantity, if they are compared; exact zero is stated as such."""
    if not quantity.values:
        return ""
    unequal, count = quantity.unequal, len(quantity.values)
    if not unequal:
        return (
            f"The difference is exactly zero at every step: all {count} numbers have the same bits "
            "in both runs."
        )
    at, widest = max(quantity.difference.items(), key=lambda point: width(point[1]))
    return (
        f"{len(unequal)} of {count} numbers differ, the first at step {unequal[0].step} on rank "
        f"{unequal[0].rank}. The widest difference is {widest:.3e}, at step {at}."
    )


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


def _work(total: Mapping[str, int]) -> str:
    names = ("captured", "replayed", "eager", "mismatched", "verified", "outputs_only")
    captured, replayed, eager, mismatched, *verified = (f"{total.get(n, 0):,}" for n in names)
    return (
        f"On all ranks {captured} graphs were captured. Of their passes {replayed} were replays, "
        f"{eager} eager instead, {mismatched} not allowed by a guard, {verified[0]} verified with "
        f"gradients, {verified[1]} in outputs only."
    )
