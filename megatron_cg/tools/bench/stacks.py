"""Sampled stacks in folded form: ``thread;outer;...;inner COUNT``, one a line. Pure."""

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
    """A function on a stack, and the line that it had reached; 0 where that is not known."""

    function: str
    line: int


Stacks = Mapping[str, Counter[tuple[Frame, ...]]]
"""Of each thread how often each stack was seen, outermost frame first."""


def read_stacks(lines: Iterable[str]) -> Stacks:
    """Lines that are not of the form, as the last of a file that was cut off, are left out."""
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
    """A frame without the folders of this machine; those below a package's root are short."""
    match = _FRAME.fullmatch(text)
    if match is None:
        return Frame(text, 0)
    file = match["file"]
    file = os.path.basename(file) if os.path.isabs(file) else file
    return Frame(f"{match['name']} ({file})", int(match["line"] or 0))


def by_function(stacks: Counter[tuple[Frame, ...]]) -> list[tuple[str, int, int]]:
    """How often each function was on a stack of a thread, and how often innermost.

    A function counts once a stack however often it is on it, and wherever in it it stands. The
    order is by the second number, so that what takes the time itself comes first.
    """
    on: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for stack, count in stacks.items():
        # Each once; of equal counts the outermost is listed first.
        for name in dict.fromkeys(frame.function for frame in stack):
            on[name] += count
        if stack:
            own[stack[-1].function] += count
    rows = [(name, seen, own[name]) for name, seen in on.items()]
    return sorted(rows, key=lambda row: (-row[2], -row[1]))
