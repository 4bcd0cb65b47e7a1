"""Shows the sampled stacks of one thread as a short tree: callers, callees and counts. Pure.

Calls with fewer samples than a limit are left out. A call that only calls one other shares its
line. No sample is lost: a row's count is the sum of its own, its children's and those left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_cg.tools.bench.stacks import Frame


@dataclass
class Call:
    """One function with the same callers; all lines of a function count as one call."""

    function: str
    count: int = 0
    own: int = 0
    """Samples with this call innermost."""
    lines: set[int] = field(default_factory=set)
    inner: dict[str, Call] = field(default_factory=dict)

    @property
    def line(self) -> int:
        """The line that all samples had reached; 0 if there are several, or none is known."""
        return next(iter(self.lines)) if len(self.lines) == 1 else 0


@dataclass(frozen=True)
class Row:
    """One line of the tree."""

    depth: int
    calls: tuple[Call, ...]
    """Several if each did little but call the next."""
    count: int
    own: int
    """Samples with one of ``calls`` innermost."""
    cut: int
    """Samples in calls that are left out."""


def call_tree(stacks: Mapping[tuple[Frame, ...], int]) -> Call:
    """The whole tree; its root represents the thread and has no function."""
    root = Call("")
    for stack, count in stacks.items():
        call = root
        call.count += count
        for frame in stack:
            call = call.inner.setdefault(frame.function, Call(frame.function))
            call.count += count
            call.lines.add(frame.line)
        call.own += count
    return root


def rows(root: Call, least: float) -> Iterator[Row]:
    """The rows of a thread's calls: callers first, and the most frequent callee first.

    Args:
        root: the result of :func:`call_tree`.
        least: calls with fewer samples are left out. A line that passes on all but fewer than this
            is joined with the next.
    """
    kept, _ = _inner(root, least)
    for call in kept:
        yield from _below(call, 0, least)


def _below(first: Call, depth: int, least: float) -> Iterator[Row]:
    calls, own, cut = [first], first.own, 0
    kept, left_out = _inner(first, least)
    # Compared with the first one, so that many small shares cannot add up unnoticed.
    while len(kept) == 1 and first.count - kept[0].count < least:
        calls.append(kept[0])
        own, cut = own + kept[0].own, cut + left_out
        kept, left_out = _inner(kept[0], least)
    yield Row(depth, tuple(calls), first.count, own, cut + left_out)
    for call in kept:
        yield from _below(call, depth + 1, least)


def _inner(call: Call, least: float) -> tuple[list[Call], int]:
    """The calls to show, and the number of samples in the others."""
    ordered = sorted(call.inner.values(), key=lambda inner: -inner.count)
    kept = [inner for inner in ordered if inner.count >= least]
    return kept, sum(inner.count for inner in ordered[len(kept) :])
