"""``megatron-cg report``: what a run recorded, and whether another run has the same bits."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.tools.align import compare as align
from megatron_cg.tools.align.run import EAGER, GRAPHS
from megatron_cg.tools.record import read_record


def invoke(args: Namespace, _extra: object) -> int:
    print(*lines(*read_runs(args.directory, args.against)), sep="\n")
    return 0


def read_runs(directory: Path, against: Path | None = None) -> tuple[align.Run, align.Run | None]:
    """The run in ``directory``, and the one that it is compared with.

    A folder has ``rank0.jsonl``, a ``record`` with it, or ``eager`` and ``graphs``, as align leaves
    them; these are compared. Raises RecordError if there is no record.
    """
    if against is None and all(_records(directory / name) for name in (EAGER, GRAPHS)):
        directory, against = directory / GRAPHS, directory / EAGER
    return _read(directory), None if against is None else _read(against)


def _records(directory: Path) -> Path | None:
    there = (place for place in (directory, directory / "record") if place.is_dir())
    return next((place for place in there if read_record.record_files(place)), None)


def _read(directory: Path) -> align.Run:
    return read_record.read_run(_records(directory) or directory)


def lines(run: align.Run, reference: align.Run | None = None) -> Iterator[str]:
    first = run[min(run)]
    yield f"{len(run)} ranks on {first['device']}, {first.get('began') or 'some time'}"
    yield outcome(run)
    if reference is not None:
        yield compared(run, reference)
    if found := faults(run):
        yield from ("", "Mismatches and faults:", *found)
    if peak := max(int(record.get("peak_allocated_bytes", 0)) for record in run.values()):
        yield f"Highest allocated, of the rank that had most: {peak / 2**20:.0f} MiB."
    counts = (f"{n:,} {name.replace('_', ' ')}" for name, n in align.graph_counts(run).items() if n)
    yield f"Graphs, all ranks: {', '.join(counts) or 'none'}."


def outcome(run: align.Run) -> str:
    steps = f"{len(run[min(run)]['steps'])} steps are recorded"
    if any(record["error"] for record in run.values()):
        return f"The run failed. {steps}."
    if missing := align.missing_ranks(run):
        return f"Some ranks are missing. {steps}. The run has {missing}."
    if not all(record["finished"] for record in run.values()):
        return f"Not ended. {steps}: the run is still going, or was killed."
    return f"Trained to its end. {steps}."


def compared(run: align.Run, reference: align.Run) -> str:
    """Whether both have the same bits, by the rules of ``megatron-cg align``."""
    found = align.compare(reference, run)
    count = f"{len(found.values)} losses and gradient norms, {found.shards} parameter shards"
    reason = f": {found.reason}" if found.reason else ", to the last bit"
    return f"{found.status.upper()}{reason}. Compared with the other run: {count}."


def faults(run: align.Run) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for rank in sorted(run):
        for text in _faults_of(run[rank]):
            ranks.setdefault(text, []).append(rank)
    return [
        f"- rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}: {text}"
        for text, found in ranks.items()
    ]


def _faults_of(record: Mapping[str, Any]) -> Iterator[str]:
    for event in record["events"]:
        yield f"after step {event['after_step']}, {event['level']}: {event['text']}"
    for capture in record["captures"]:
        if capture["error"]:
            yield f"after step {capture['after_step']}, capture failed: {capture['error']}"
    if record["error"]:
        yield f"ended with {record['error']}"
