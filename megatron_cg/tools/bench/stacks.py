"""Reads sampled stacks in folded form: one ``thread;outer;...;inner COUNT`` per line. Pure."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_FRAME = re.compile(r"(?P<name>.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)")
_THREAD = re.compile(r"^(?:thread|process) ")
ALL = "all threads"


class Frame(NamedTuple):
    """A function on a stack, and the line that it had reached; 0 if unknown."""

    function: str
    line: int


Stacks = Mapping[str, Counter[tuple[Frame, ...]]]
"""For each thread the count of each stack, outermost frame first."""


def read_stacks(lines: Iterable[str]) -> Stacks:
    """Parse the lines; skips malformed ones, such as the last line of a truncated file."""
    found: dict[str, Counter[tuple[Frame, ...]]] = {}
    for line in lines:
        stack, _, count = line.strip().rpartition(" ")
        if not stack or not count.isdecimal():
            continue
        frames = stack.split(";")
        thread = ALL
        while frames and _THREAD.match(frames[0]):
            thread = frames.pop(0)
        found.setdefault(thread, Counter())[tuple(map(_frame, frames))] += int(count)
    return found


def _frame(text: str) -> Frame:
    """A frame without this machine's folders; paths below a package's root are short."""
    match = _FRAME.fullmatch(text)
    if match is None:
        return Frame(text, 0)
    file = match["file"]
    file = os.path.basename(file) if os.path.isabs(file) else file
    return Frame(f"{match['name']} ({file})", int(match["line"] or 0))


def by_function(stacks: Counter[tuple[Frame, ...]]) -> list[tuple[str, int, int]]:
    """For each function, how often it was on a stack of a thread, and how often innermost.

    A function counts once per stack, wherever and however often it occurs. The order is by the
    second number, so functions that take the time themselves come first.
    """
    on: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for stack, count in stacks.items():
        # Each function once; with equal counts the outermost is listed first.
        for name in dict.fromkeys(frame.function for frame in stack):
            on[name] += count
        if stack:
            own[stack[-1].function] += count
    rows = [(name, seen, own[name]) for name, seen in on.items()]
    return sorted(rows, key=lambda row: (-row[2], -row[1]))
