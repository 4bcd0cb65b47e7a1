"""The report's tables of host time: by phase, and while the GPU was idle. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cg.tools.bench.results.grids import NONE, grid, number
from megatron_cg.tools.bench.results.metrics import Row

_LISTED = 8
"""The rows of a table of idle time."""


def phase_lines(rows: Sequence[Row]) -> list[str]:
    """Host time by phase, from each configuration's own window of probed steps, rank 0."""
    probed = {row.name: row.probed for row in rows if row.probed}
    if not probed:
        return []
    cells: dict[str, dict[str, str]] = {}
    longest: dict[str, float] = {}
    for name, found in probed.items():
        for spent in found["phases"]:
            phase = f"{spent['phase']} [{spent['thread']}]"
            longest[phase] = max(longest.get(phase, 0.0), spent["ms"])
            text = f"{spent['ms']:,.1f} ({spent['own_ms']:,.1f}; {spent['calls']:,.0f})"
            cells.setdefault(phase, {})[name] = text
    body = [
        [phase, *(cells[phase].get(name, NONE) for name in probed)]
        for phase in sorted(cells, key=lambda phase: -longest[phase])
    ]
    steps = [f"{found['step_ms']:,.1f}" for found in probed.values()]
    body.append(["whole step, as probed", *steps])
    title = "Host time a step: ms (of it in no other phase, ms; calls)"
    return [f"{title}:", "", *grid(["phase [thread]", *probed], body), ""]


def idle_lines(rows: Sequence[Row]) -> list[str]:
    """What ended the GPU's idle time, and what the host did meanwhile."""
    lines: list[str] = []
    for row in rows:
        trace = row.result["trace"] if row.result["ranks"] else None
        if not trace:
            continue
        how = f"traced with all events of the host: {number(trace['idle_ms'])} ms a step"
        launches = [
            [
                f"{found['phase']} / {found['launched_by']} [{found['thread']}]",
                "host" if found["launched_late"] else "GPU",
                number(found["ms"], ",.2f"),
                number(found["gaps"], ",.1f"),
            ]
            for found in trace["idle_by_launch"][:_LISTED]
        ]
        work = [
            [f"{found['phase']} / {found['what']} [{found['thread']}]", number(found["ms"], ",.2f")]
            for found in trace["idle_by_host_work"][:_LISTED]
        ]
        lines += [f"{row.name}, what ended the GPU's idle time ({how}):", ""]
        lines += grid(["phase / launched by [thread]", "waited for", "ms a step", "gaps"], launches)
        lines += ["", f"{row.name}, what the host did meanwhile:", ""]
        lines += [*grid(["phase / innermost [thread]", "ms a step"], work), ""]
    return lines
