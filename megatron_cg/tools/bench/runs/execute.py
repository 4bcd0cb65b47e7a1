"""Makes runs one after the other; returns what each measured, or how it failed."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_cg.tools.align.processes import Run, named_error
from megatron_cg.tools.bench.measure.sampling import SUFFIX
from megatron_cg.tools.bench.measure.windows import TRACED
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun
from megatron_cg.tools.bench.runs.budget import Budget
from megatron_cg.tools.bench.runs.configurations import KNOWN
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT, OK, Result
from megatron_cg.tools.bench.traces.busy import busy_metrics
from megatron_cg.tools.bench.traces.idle import analyse
from megatron_cg.tools.bench.traces.spreads import MetricsError
from megatron_cg.tools.bench.traces.timeline import Timeline, read_timeline

_TAIL = 30
_LOOK = 0.25
GRACE = 30.0
"""Seconds that a run may take to exit after it has written all metrics."""
_KEPT_ENVIRONMENT = ("NVTE_", "NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS")


@dataclass(frozen=True)
class Options:
    """Options for all runs."""

    work: Path
    """Directory for logs, traces and samples."""
    invocation: str
    """An id; runs of the same invocation are compared side by side."""
    timeout: float
    """Time limit of one run, in seconds."""
    budget: float | None = None
    """Seconds after which no further run is started."""
    keep_traces: bool = False
    samples: Path | None = None
    """Directory for sampling profiles."""


Start = Callable[[PlannedRun, Path], Run]
Read = Callable[[Timeline, int], dict[str, Any]]


def execute(
    runs: Sequence[PlannedRun],
    start: Start,
    options: Options,
    facts: Mapping[str, Any],
    *,
    finished: Callable[[Result], None],
    refused: Callable[[PlannedRun], str] = lambda _run: "",
) -> list[Result]:
    """Make the runs in turn.

    Args:
        runs: the planned runs.
        start: starts the process of a run, with a folder for its log and metrics.
        refused: why a run cannot be made on this machine; empty if it can.
        options: limits and directories.
        facts: added to each result: machine, backend.
        finished: called with each result as soon as it is known.

    Returns:
        A result for each run, including those that were skipped.
    """
    budget = Budget(options.budget)
    results = []
    for run in runs:
        why = refused(run) or budget.refusal(run)
        if why:
            result = _result(run, options, facts) | {"status": LEFT_OUT, "error": why}
        else:
            limit = min(options.timeout, budget.left())
            result = _made(run, start, replace(options, timeout=limit), facts)
            if result["status"] == OK:
                budget.took(run, result["seconds"])
        finished(result)
        results.append(result)
    return results


def _result(run: PlannedRun, options: Options, facts: Mapping[str, Any]) -> Result:
    return {
        "key": run.key,
        "baseline": KNOWN[run.configuration].baseline,
        "invocation": options.invocation,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": run.settings.as_dict(),
        **facts,
        "status": FAILED,
        "error": "",
        "tail": [],
        "seconds": 0.0,
        "ranks": [],
        "device_trace": None,
        "trace": None,
        "notes": [],
    }


def _made(run: PlannedRun, start: Start, options: Options, facts: Mapping[str, Any]) -> Result:
    result = _result(run, options, facts)
    folder = options.work / f"{run.name}.{options.invocation}"
    process = start(run, folder)
    began = time.monotonic()
    try:
        process.start(options.timeout)
        code = _wait(process, folder / "metrics", run.settings.nproc, began + options.timeout)
    finally:
        process.stop()
    result["seconds"] = time.monotonic() - began
    result["command"] = shown_words(process.words)
    result["environment"] = shown_environment(process.env)
    result["ranks"] = _ranks(folder / "metrics")
    whole = bool(result["ranks"]) and all(rank["finished"] for rank in result["ranks"])
    if code == 0 and whole:
        result["status"] = OK
    else:
        text = process.text()
        named = process.overdue or named_error(text)
        named = named or (f"exit code {code}" if code else "no metrics were written")
        result |= {"error": named, "tail": text.splitlines()[-_TAIL:]}
    _add_profile(result, folder / "metrics", options)
    print(f"{run.name}: {result['status']} after {result['seconds']:.0f} s", file=sys.stderr)
    return result


def _wait(process: Run, metrics: Path, ranks: int, deadline: float) -> int:
    """The run's exit code; 0 if it wrote all its metrics but does not exit.

    A process with graphs and collectives may hang during teardown; that does not affect its
    metrics.
    """
    done_since: float | None = None
    while process.process is not None and process.process.poll() is None:
        now = time.monotonic()
        found = _ranks(metrics)
        if done_since is None and len(found) == ranks and all(rank["finished"] for rank in found):
            done_since = now
        if done_since is not None and now - done_since > GRACE:
            print(f"{process.name}: measured, and stopped since it does not end", file=sys.stderr)
            process.stop()
            return 0
        if now > deadline:
            break
        time.sleep(_LOOK)
    return process.wait()


def shown_words(words: Sequence[str]) -> list[str]:
    """A command line for the record: file names without this machine's folders."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that GPU libraries read, except those that contain a path."""
    return {
        name: env[name]
        for name in sorted(env)
        if name.startswith(_KEPT_ENVIRONMENT) and "/" not in env[name]
    }


def _ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote, by rank; an unreadable file counts as missing."""
    found = []
    for path in folder.glob("rank*.json"):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            continue
    return sorted(found, key=lambda rank: int(rank["rank"]))


def _add_profile(result: Result, folder: Path, options: Options) -> None:
    """Add the analysis of rank 0's traces; note its sampling profile and unreadable traces."""
    first = result["ranks"][0] if result["ranks"] else {}
    kinds: list[tuple[str, str, Read]] = [
        (TRACED, "device_trace", busy_metrics),
        ("profiled", "trace", analyse),
    ]
    for kind, name, read in kinds:
        if window := first.get(kind):
            trace = folder / window["trace"]
            try:
                result[name] = read(read_timeline(trace), window["steps"])
            except MetricsError as error:
                result["notes"].append(str(error))
            _put_away(trace, keep=options.keep_traces)
    if sampled := first.get("sampled"):
        profile = folder / sampled["file"]
        if sampled["note"]:
            result["notes"].append(f"samples: {sampled['note']}")
        if profile.exists() and options.samples is not None:
            options.samples.mkdir(parents=True, exist_ok=True)
            kept = options.samples / f"{folder.parent.name}{SUFFIX}"
            shutil.copy(profile, kept)
            result["notes"].append(_sampled(sampled, kept))


def _sampled(facts: Mapping[str, Any], file: Path) -> str:
    lost = f", {facts['lost']:,} samples lost" if facts["lost"] else ""
    return (
        f"a sampling profile of {facts['steps']} steps of {facts['step_ms']:,.1f} ms{lost} is in "
        f"{file.parent.name}/{file.name}: open it in https://www.speedscope.app"
    )


def _put_away(trace: Path, *, keep: bool) -> None:
    """Delete a trace, or compress it."""
    if keep and trace.exists():
        with trace.open("rb") as text, gzip.open(f"{trace}.gz", "wb", 5) as packed:
            shutil.copyfileobj(text, packed)
    trace.unlink(missing_ok=True)
