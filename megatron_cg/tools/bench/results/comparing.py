"""Compares two sets of results, metric by metric. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_cg.tools.bench.results.grids import grid, number
from megatron_cg.tools.bench.results.metrics import Metrics, joined
from megatron_cg.tools.bench.runs.store import Result, by_configuration, configuration_slug, newest

_COMPARED = {
    "step ms": "step",
    "step / busy": "step_per_busy",
    "GPU busy ms": "busy",
    "kernel launches": "kernel_launches",
    "peak allocated MiB": "peak_allocated",
    "peak reserved MiB": "peak_reserved",
    "capture s": "capture_seconds",
    "peak in capture MiB": "capture_peak",
    "bytes a replay": "bytes_per_replay",
}
_OF_TRACE = ("step / busy", "GPU busy ms")


class Change(NamedTuple):
    """One metric of one configuration, old and new."""

    name: str
    metric: str
    old: float
    new: float


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """Every metric that both have, for configurations at the same point, over all rounds."""
    before, now = _by_name(old), _by_name(new)
    return [
        Change(name, title + _difference(title, before[name], now[name]), was, is_now)
        for name in now
        if name in before
        for title, metric in _COMPARED.items()
        if (was := before[name][metric]) is not None and (is_now := now[name][metric]) is not None
    ]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """The section of a report; above 1 the new value is smaller."""
    if not changes:
        return []
    body = [
        [
            f"{name}: {metric}",
            number(old, ",.2f"),
            number(new, ",.2f"),
            number(old / new if new else None, ".3f"),
        ]
        for name, metric, old, new in changes
    ]
    return ["## Compared", "", *grid(["metric", "old", "new", "old / new"], body), ""]


def _difference(title: str, old: Metrics, new: Metrics) -> str:
    """Why an old and a new metric are not comparable. See Note [Which trace] in metrics.py."""
    if title not in _OF_TRACE or old["device_alone"] == new["device_alone"]:
        return ""
    return f" ({'old' if new['device_alone'] else 'new'}: traced with host events)"


def _by_name(results: Sequence[Result]) -> dict[str, Metrics]:
    groups = by_configuration(newest(results))
    return {configuration_slug(rounds[0]["key"]): joined(rounds) for rounds in groups}
