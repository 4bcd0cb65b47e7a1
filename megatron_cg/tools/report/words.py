"""The sentences of the page: the findings without a picture. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from megatron_cg.tools.align.compare import DIFFERENT, IDENTICAL, NOT_COMPARABLE, Run, missing_ranks
from megatron_cg.tools.report.series import MIB, Quantity, counted_steps, median_times, width
from megatron_cg.tools.report.story import Story


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
        numbers = count(len(values), "loss or gradient norm", "losses and gradient norms")
        return Verdict(
            "good",
            "Identical, to the last bit",
            f"{numbers} and {count(comparison.shards, 'parameter shard')} of {story.name} have the "
            f"same bits as those of {story.reference_name}.",
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
    steps = count(len(story.rank["steps"]), "step")
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
        numbers = f"all {quantity.compared} numbers have"
        if quantity.compared == 1:
            numbers = "the one number has"
        return (
            f"The difference is exactly zero at every step: {numbers} the same bits in both runs."
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


def title(story: Story) -> str:
    """The model and the date of the run, as far as they were recorded."""
    model = story.rank.get("setup", {}).get("model", {})
    experts = model.get("num_experts") or model.get("experts")
    layers = model.get("num_layers") or model.get("layers")
    known = {
        "hybrid model": model.get("hybrid_layer_pattern"),
        f"MoE model with {experts} experts": experts,
        "dense model": layers and model.get("hidden_size"),
        "model": layers,
    }
    name = next((name for name, found in known.items() if found), story.title)
    words = [name[:1].upper() + name[1:] if layers else name]
    words += [f"{layers} layers"] if layers else []
    words += [f"hidden size {model['hidden_size']}"] if model.get("hidden_size") else []
    words += [story.rank["began"][:10]] if "began" in story.rank else []
    return ", ".join(words)


def what(story: Story) -> str:
    """The runs of the page, for its head."""
    # The title of two folders names them both.
    named = story.reference is None or " against " in story.title
    runs = "" if named else f": {story.name} against {story.reference_name}"
    where = str(story.rank.get("device", "cpu")) if story.on_gpu else "no GPU"
    return f"{story.title}{runs}, {count(len(story.run), 'rank')}, {where}"


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


def points(capture: Mapping[str, Any]) -> str:
    """Allocated memory at each recorded point of a capture; empty without a GPU."""
    found = [
        f"{name} {memory['allocated_bytes'] / MIB:,.0f} MiB"
        for name, memory in capture["memory"].items()
        if memory and "allocated_bytes" in memory
    ]
    return f"Allocated: {', '.join(found)}." if found else ""


def work(total: Mapping[str, int]) -> str:
    """What graphs did on all ranks."""
    if not total:
        return "No count of graphs was recorded."
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


def count(number: int, one: str, more: str = "") -> str:
    """``3 steps``, ``1 step``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
