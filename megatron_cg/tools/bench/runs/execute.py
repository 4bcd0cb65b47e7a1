"""Makes runs one after the other, and yields what each measured, or how it failed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_cg.tools.align.processes import Run, named_error
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun
from megatron_cg.tools.bench.runs.budget import Budget
from megatron_cg.tools.bench.runs.commands import METRICS
from megatron_cg.tools.bench.runs.configurations import KNOWN
from megatron_cg.tools.bench.runs.profiles import add_profiles
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT, OK, Result

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
"""Makes the process of a run, with a folder for its log and metrics."""


def execute(
    runs: Sequence[PlannedRun],
    start: Start,
    options: Options,
    facts: Mapping[str, Any],
    refused: Callable[[PlannedRun], str] = lambda _run: "",
) -> Iterator[Result]:
    """Make the runs in turn; yields each result as soon as it is known, also of skipped runs.

    Args:
        runs: the planned runs.
        start: see :data:`Start`.
        options: limits and directories.
        facts: added to each result: machine, backend.
        refused: why a run cannot be made on this machine; empty if it can.
    """
    budget = Budget(options.budget)
    for run in runs:
        result: Result = {
            "key": run.key,
            "baseline": KNOWN[run.configuration].baseline,
            "invocation": options.invocation,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": run.settings.as_dict(),
            **facts,
            "status": LEFT_OUT,
            "error": refused(run) or budget.refusal(run),
            "tail": [],
            "seconds": 0.0,
            "ranks": [],
            "device_trace": None,
            "trace": None,
            "notes": [],
        }
        if not result["error"]:
            folder = options.work / f"{run.name}.{options.invocation}"
            timeout = min(options.timeout, budget.left())
            result |= _made(start(run, folder), run.settings.nproc, timeout)
            add_profiles(result, folder, options.samples, keep_traces=options.keep_traces)
            print(
                f"{run.name}: {result['status']} after {result['seconds']:.0f} s", file=sys.stderr
            )
        if result["status"] == OK:
            budget.took(run, result["seconds"])
        yield result


def _made(process: Run, nproc: int, timeout: float) -> Result:
    """What a run left."""
    metrics = process.directory / METRICS
    began = time.monotonic()
    try:
        process.start(timeout)
        code = _wait(process, metrics, nproc, began + timeout)
    finally:
        process.stop()
    ranks = _ranks(metrics)
    made: Result = {
        "status": OK,
        "seconds": time.monotonic() - began,
        "command": shown_words(process.words),
        "environment": shown_environment(process.env),
        "ranks": ranks,
    }
    if code or not ranks or not all(rank["finished"] for rank in ranks):
        text = process.text()
        wrong = process.overdue or named_error(text)
        wrong = wrong or (f"exit code {code}" if code else "no metrics were written")
        made |= {"status": FAILED, "error": wrong, "tail": text.splitlines()[-_TAIL:]}
    return made


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


def _ranks(folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote, by rank; an unreadable file counts as missing."""
    found = []
    for path in folder.glob("rank*.json"):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            continue
    return sorted(found, key=lambda rank: int(rank["rank"]))


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
