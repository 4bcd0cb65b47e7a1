"""Converts a sampling profile to ms per step: by thread, as call tree, by function. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_cg.tools.bench.call_tree import Row, call_tree, rows
from megatron_cg.tools.bench.stacks import ALL, Frame, by_function, read_stacks

LEAST = 0.01
"""Calls with a smaller share of a step are left out of the tree."""
_FUNCTIONS = 40
MAIN, BACKWARD = "main", "backward"
_OUTERMOST = ("<module> ", "_run_module_as_main ")
_AUTOGRAD = ("BackwardCFunction.apply ", "torch::autograd::")
Counts = Counter[tuple[Frame, ...]]


def host_calls(lines: Iterable[str], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The profile from folded ``lines``; None if there are no samples.

    Args:
        lines: the sampler's output.
        facts: of its window: ``steps``, ``step_ms``, and the result of :class:`Sampler.stop`. A
            lost sample has no stacks; the other samples are scaled up to replace it.
    """
    stacks = {thread: counts for thread, counts in read_stacks(lines).items() if counts}
    if not stacks:
        return None
    looks = facts["steps"] * facts["step_ms"] / facts["interval_ms"]
    # A sample sees a thread at most once, so there were at least as many samples as stacks.
    good = max(looks - facts["lost"], *(counts.total() for counts in stacks.values()))
    ms = facts["step_ms"] / good
    trees, others = [], []
    for thread, counts in sorted(stacks.items(), key=lambda item: -item[1].total()):
        role = _role(thread, counts)
        if role:
            trees.append({"thread": role} | _thread(counts, ms, LEAST * good))
        else:
            others.append({"thread": thread, "ms": _rounded(counts.total() * ms)})
    return {
        "sampler": facts["sampler"],
        "steps": facts["steps"],
        "step_ms": facts["step_ms"],
        "stacks": sum(counts.total() for counts in stacks.values()),
        "looks": round(looks),
        "lost": facts["lost"],
        "stack_ms": ms,
        "least_ms": LEAST * facts["step_ms"],
        "threads": sorted(trees, key=lambda tree: tree["thread"] != MAIN),
        "other_threads": others,
    }


def _role(thread: str, stacks: Counts) -> str:
    """The thread's role; empty for a thread that is neither the main one nor autograd's."""
    if thread == ALL:
        return ALL
    outermost = {stack[0].function for stack in stacks if stack}
    if thread.endswith("MainThread") or any(name.startswith(_OUTERMOST) for name in outermost):
        return MAIN
    functions = {frame.function for stack in stacks for frame in stack}
    return BACKWARD if any(name.startswith(_AUTOGRAD) for name in functions) else ""


def _thread(stacks: Counts, ms: float, least: float) -> dict[str, Any]:
    tree = call_tree(stacks)
    return {
        "ms": _rounded(tree.count * ms),
        "no_frame_ms": _rounded(tree.own * ms),
        "tree": [_row(row, ms) for row in rows(tree, least)],
        "functions": [
            {"function": name, "ms": _rounded(on * ms), "own_ms": _rounded(own * ms)}
            for name, on, own in by_function(stacks)[:_FUNCTIONS]
        ],
    }


def _row(row: Row, ms: float) -> dict[str, Any]:
    last = row.calls[-1]
    return {
        "depth": row.depth,
        "function": last.function,
        "line": last.line or None,
        "through": [call.function for call in row.calls[:-1]],
        "ms": _rounded(row.count * ms),
        "own_ms": _rounded(row.own * ms),
        "cut_ms": _rounded(row.cut * ms),
    }


def _rounded(ms: float) -> float:
    return round(ms, 3)
