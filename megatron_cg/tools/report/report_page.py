"""Computes what ``report.html`` shows of a run or of two: its sentences and tables."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_cg.tools.align.compare import (
    DIFFERENT,
    IDENTICAL,
    NOT_COMPARABLE,
    Run,
    missing_ranks,
)
from megatron_cg.tools.report import plots
from megatron_cg.tools.report.story import (
    MIB,
    Quantity,
    Story,
    counted_steps,
    median_times,
    memory_over_steps,
    quantities,
    step_times,
    width,
)
from megatron_cg.version import __version__


def page(story: Story) -> str:
    """The whole page as one HTML document that loads nothing."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    found, top = quantities(story), plots.highest_shown(story)
    with_memory = any(memory_over_steps(record, "allocated_bytes") for _, record in story.records)
    total = counts(story.run)
    where = str(story.rank.get("device", "cpu")) if story.on_gpu else "no GPU"
    return environment.get_template("report.html").render(
        story=story,
        title=", ".join(filter(None, [story.title, story.rank.get("began", "")[:10]])),
        about=f"{_count(len(story.run), 'rank')}, {where}",
        version=__version__,
        names=[name for name, _ in story.runs],
        verdict=verdict(story),
        faults=faults(story),
        losses=[
            (f"{q.name}. {difference(q)}", plots.plotted(partial(plots.losses, story, q)))
            for q in found
        ],
        times=plots.plotted(partial(plots.times, story)) if found else None,
        speed=speed(story),
        above=sum(
            time > top for _, record in story.records for time in step_times(record).values()
        ),
        memory=plots.plotted(partial(plots.memory, story)) if with_memory else None,
        peaks=peaks(story),
        work=_work(total) if total or story.captures else "",
        coverage=list(_coverage(story)),
        facts=_facts(story),
        commands={n: shlex.join(record.get("command") or ()) for n, record in story.records},
    )


def _coverage(story: Story) -> Iterator[list[str]]:
    """For equal neighbouring layers: their names, class and the scopes in a graph."""
    rows = story.captures[-1]["coverage"] if story.captures else ()
    for _, group in groupby(rows, lambda row: (row["kind"], row["graphed"])):
        first, *others = group
        last = f" to {others[-1]['name'].rpartition(' ')[2]}" if others else ""
        yield [first["name"] + last, first["kind"], ", ".join(first["graphed"]) or "nothing"]


def _facts(story: Story) -> list[list[str]]:
    """Versions, machine and environment: a name and the value in each run, what differs first."""
    columns = [
        {"device": record.get("device")}
        | record.get("versions", {})
        | record.get("environment", {})
        for _, record in story.records
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
    """The result: of the comparison if there are two runs, else of the run."""
    comparison = story.comparison
    if comparison is None:
        return _outcome(story)
    values, why = comparison.values, _sentence(comparison.reason)
    unequal = [value for value in values if not value.same]
    if comparison.status == IDENTICAL:
        shards = _count(comparison.shards, "parameter shard")
        return Verdict(
            "good",
            "Identical, to the last bit",
            f"{_count(len(values), 'loss or gradient norm', 'losses and gradient norms')} and "
            f"{shards} of {story.name} have the same bits as those of {story.reference_name}.",
        )
    if comparison.status == DIFFERENT:
        return Verdict("bad", "Different", why)
    if unequal:
        first = unequal[0]
        return Verdict(
            "bad",
            "Different",
            f"{len(unequal)} of {len(values)} numbers differ, the first at step {first.step} on "
            f"rank {first.rank} ({first.name}). {why}",
        )
    if values and all(_ended(run) for _, run in story.runs):
        text = f"All {len(values)} numbers have the same bits. More is not shown: {why}"
        return Verdict("note", "Equal in every loss and gradient norm", text)
    return Verdict("note" if comparison.status == NOT_COMPARABLE else "bad", "Not comparable", why)


def _outcome(story: Story) -> Verdict:
    steps = _count(len(story.rank["steps"]), "step")
    broken = [f"rank {rank}: {data['error']}" for rank, data in story.run.items() if data["error"]]
    if broken:
        return Verdict("bad", "The run failed", _sentence(f"After {steps}. {'; '.join(broken)}"))
    missing = missing_ranks(story.run)
    if missing:
        text = _sentence(f"{steps}. The run has {missing}")
        return Verdict("note", "Some ranks are missing", text)
    if not _ended(story.run):
        text = f"{steps} recorded so far: the run is still going, or was killed."
        return Verdict("note", "Not ended", text)
    return Verdict("note", "Trained to its end", f"{steps}. There is no run to compare it with.")


def _ended(run: Run) -> bool:
    return bool(run) and all(data["finished"] and not data["error"] for data in run.values())


def difference(quantity: Quantity) -> str:
    """How two runs differ in one quantity; an exact zero is stated as such."""
    if quantity.difference is None:
        alone = quantity.reference is None
        return "There is no run to compare with." if alone else "The runs have different setups."
    if not quantity.compared:
        return "The runs have no step in common."
    if not quantity.unequal:
        return (
            f"The difference is exactly zero at every step: all {quantity.compared} numbers have "
            "the same bits in both runs."
        )
    step, rank = quantity.unequal[0]
    at, widest = max(quantity.difference.items(), key=lambda point: width(point[1]))
    return (
        f"{len(quantity.unequal)} of {quantity.compared} numbers differ, the first at step {step} "
        f"on rank {rank}. The widest difference is {widest:.3e}, at step {at}."
    )


def speed(story: Story) -> str:
    """The median step time of each run, and the steps that it covers."""
    medians, steps = median_times(story), counted_steps(story)
    if story.name not in medians:
        return "No step is left to compute a time from."
    ours = medians[story.name]
    text = f"Median step: {story.name} {ours:.1f} ms"
    if story.reference is not None and story.reference_name in medians:
        theirs = medians[story.reference_name]
        text += f", {story.reference_name} {theirs:.1f} ms, a ratio of {ours / theirs:.3f}"
    text += f" (steps {steps.start} to {steps.stop - 1}, rank {min(story.run)})."
    return text if story.on_gpu else f"{text} No GPU was used: times mean nothing for a GPU."


def peaks(story: Story) -> str:
    """The peak memory of each run, on the rank with the highest."""
    highest = [
        (name, max(int(run[rank].get("peak_allocated_bytes", 0)) for rank in run))
        for name, run in story.runs
    ]
    text = ", ".join(f"{name} {bytes_ / MIB:.0f} MiB" for name, bytes_ in highest)
    if len(highest) == 2 and highest[0][1]:
        text += f", a ratio of {highest[1][1] / highest[0][1]:.3f}"
    return f"Highest allocated, of the rank that had most: {text}."


def faults(story: Story) -> list[str]:
    """Every error, failed capture and warning, once, with its ranks."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for name, run in story.runs:
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
    """What graphs did on all ranks."""
    names = ("captured", "replayed", "eager", "mismatched", "verified")
    captured, replayed, eager, mismatched, verified = (f"{total.get(n, 0):,}" for n in names)
    return (
        f"On all ranks {captured} graphs were captured. Of their passes {replayed} were replays, "
        f"{eager} eager instead, {mismatched} not allowed by a guard, {verified} verified."
    )


def counts(run: Run) -> dict[str, int]:
    """The run's counters, summed over all ranks; empty if it had no graphs.

    They are those at the end or, if the run did not get there, the last written ones.
    """
    total: Counter[str] = Counter()
    for record in run.values():
        rows = record.get("intervals", ())
        total.update(record["graphs"] or (rows[-1]["counters"] if rows else {}))
    return dict(total) if total["captured"] else {}


def _count(number: int, one: str, more: str = "") -> str:
    """``3 steps``, ``1 step``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
