"""What the report says of host time: by phase, of guards and votes, while the GPU idles. Pure.

Note [What a share is a share of]
    Guards are counted in the timed steps. Votes, and what else a replay takes, are from the probed
    steps. Votes lie between two steps, so they are in a step's time from one start to the next.
    The share is of the rank's own median step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cg.tools.bench.results.grids import NONE, grid, number
from megatron_cg.tools.bench.results.metrics import Row

AIM = 0.01
"""Guards and votes together should take less of a step."""
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


def _overheads(rank: Mapping[str, Any]) -> dict[str, float] | None:
    """One rank's host time of guards and votes in a step, in microseconds, and related counts.

    ``guards`` includes inputs counted, and backward passes given their guards; ``waiting`` is the
    part of ``votes`` spent waiting for other ranks; ``copied`` and ``in_place`` are inputs of a
    replay. For ``share`` see Note [What a share is a share of].

    None without replays, or without timed and probed steps.
    """
    timed, probed = rank.get("timed") or {}, rank.get("probed")
    counters = timed.get("counters") or {}
    replayed = counters.get("replayed", 0)
    if not replayed or not probed or "guard_ns" not in counters:
        return None
    steps = timed["step_ms"]
    around, votes, waiting = (
        1e3 * sum(row["ms"] for row in probed["phases"] if row["phase"] == phase)
        for phase in ("guard: around a replay", "votes", "votes: wait")
    )
    guards = counters["guard_ns"] / len(steps) / 1e3 + around
    return {
        "guards": guards,
        "votes": votes,
        "waiting": waiting,
        "share": (guards + votes) / (statistics.median(steps) * 1e3),
        "copied": counters["inputs_copied"] / replayed,
        "in_place": counters["inputs_in_place"] / replayed,
        "mismatched": counters["mismatched"],
    }


def overhead_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each configuration with this package's graphs."""
    lines: list[str] = []
    for row in rows:
        found = [one for rank in row.result["ranks"] if (one := _overheads(rank)) is not None]
        if not found:
            continue
        first, highest = found[0], max(one["share"] for one in found)
        word = "under" if highest < AIM else "over"
        lines += [
            f"{row.name}, guards and votes: {highest:.2%} of a step, {word} the aim of {AIM:.0%}. "
            f"Rank 0: guards {first['guards']:,.0f} us a step, votes {first['votes']:,.0f} us, of "
            f"which {first['waiting']:,.0f} us wait for other ranks. Inputs of a replay: "
            f"{first['copied']:.1f} copied, {first['in_place']:.1f} read in place. Mismatches: "
            f"{sum(one['mismatched'] for one in found)}.",
            "",
        ]
    return lines


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
