"""Adds to a result what the traces of rank 0 say, and puts its profiles where they are kept."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.measure.sampling import SUFFIX
from megatron_cg.tools.bench.measure.windows import TRACED
from megatron_cg.tools.bench.runs.commands import METRICS
from megatron_cg.tools.bench.runs.store import Result
from megatron_cg.tools.bench.traces.busy import busy_metrics
from megatron_cg.tools.bench.traces.idle import analyse
from megatron_cg.tools.bench.traces.timeline import Timeline, read_timeline

_TRACES: tuple[tuple[str, str, Callable[[Timeline, int], dict[str, Any]]], ...] = (
    (TRACED, "device_trace", busy_metrics),
    ("profiled", "trace", analyse),
)
"""The kind of its steps, its name in a result, and its analysis."""


def add_profiles(result: Result, folder: Path, samples: Path | None, *, keep_traces: bool) -> None:
    """Add the analysis of traces; note a sampling profile, and traces that cannot be read.

    Args:
        result: of the run.
        folder: of the run.
        samples: where sampling profiles are kept; nowhere if None.
        keep_traces: whether traces stay in ``folder``, compressed.
    """
    first = result["ranks"][0] if result["ranks"] else {}
    metrics = folder / METRICS
    for kind, name, read in _TRACES:
        if window := first.get(kind):
            trace = metrics / window["trace"]
            try:
                result[name] = read(read_timeline(trace), window["steps"])
            except BenchError as error:
                result["notes"].append(str(error))
            if keep_traces and trace.exists():
                with trace.open("rb") as text, gzip.open(f"{trace}.gz", "wb", 5) as packed:
                    shutil.copyfileobj(text, packed)
            trace.unlink(missing_ok=True)
    if sampled := first.get("sampled"):
        if sampled["note"]:
            result["notes"].append(f"samples: {sampled['note']}")
        profile = metrics / sampled["file"]
        if profile.exists() and samples is not None:
            samples.mkdir(parents=True, exist_ok=True)
            kept = samples / f"{folder.name}{SUFFIX}"
            shutil.copy(profile, kept)
            result["notes"].append(_sampled(sampled, kept))


def _sampled(facts: Mapping[str, Any], file: Path) -> str:
    lost = f", {facts['lost']:,} samples lost" if facts["lost"] else ""
    return (
        f"a sampling profile of {facts['steps']} steps of {facts['step_ms']:,.1f} ms{lost} is in "
        f"{file.parent.name}/{file.name}: open it in https://www.speedscope.app"
    )
