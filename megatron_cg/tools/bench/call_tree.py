"""The sampled stacks of one thread as a short tree: who called whom, and how often seen. Pure.

Calls seen less often than a limit are left out, and a call that only passes on to one other is
shown on one line with it. Nothing is lost: a row's count is its own, its children's and what it
cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_cg.tools.bench.stacks import Frame


@dataclass
class Call:
    """One function, called by the same callers; the lines of a function are one call."""

    function: str
    count: int = 0
    own: int = 0
    """Of them with this call innermost."""
    lines: set[int] = field(default_factory=set)
    inner: dict[str, Call] = field(default_factory=dict)

    @property
    def line(self) -> int:
        """The line that all samples had reached; 0 where there were several, or none is known."""
        return next(iter(self.lines)) if len(self.lines) == 1 else 0


@dataclass(frozen=True)
class Row:
    """One line of the tree."""

    depth: int
    calls: tuple[Call, ...]
    """More than one where each did little but call the next."""
    count: int
    own: int
    """With one of ``calls`` innermost."""
    cut: int
    """In calls that are left out."""


def call_tree(stacks: Mapping[tuple[Frame, ...], int]) -> Call:
    """The whole tree; its root stands for the thread and has no function."""
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
    """The rows of what the thread called, callers first, of each the most frequent call first.

    Args:
        root: as :func:`call_tree` made it.
        least: calls seen less often are left out, and a line that passes on all but less than
            this is joined with the next.
    """
    kept, _ = _inner(root, least)
    for call in kept:
        yield from _below(call, 0, least)


def _below(first: Call, depth: int, least: float) -> Iterator[Row]:
    calls, own, cut = [first], first.own, 0
    kept, left_out = _inner(first, least)
    # Measured against the first of them, so that many small shares do not add up unseen.
    while len(kept) == 1 and first.count - kept[0].count < least:
        calls.append(kept[0])
        own, cut = own + kept[0].own, cut + left_out
        kept, left_out = _inner(kept[0], least)
    yield Row(depth, tuple(calls), first.count, own, cut + left_out)
    for call in kept:
        yield from _below(call, depth + 1, least)


def _inner(call: Call, least: float) -> tuple[list[Call], int]:
    """Calls that are shown, and how often the others were seen."""
    ordered = sorted(call.inner.values(), key=lambda inner: -inner.count)
    kept = [inner for inner in ordered if inner.count >= least]
    return kept, sum(inner.count for inner in ordered[len(kept) :])
