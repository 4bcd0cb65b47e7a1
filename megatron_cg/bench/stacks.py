"""Sampled stacks in folded form: ``thread;outer;...;inner COUNT``, one a line. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

_LINE = re.compile(r":\d+\)$")
_THREAD = re.compile(r"^(?:thread|process) ")
ALL = "all threads"


def most_inclusive(lines: Iterable[str], top: int = 40) -> list[dict[str, Any]]:
    """Of each thread, the functions on most of its stacks; ``share`` of the thread's samples.

    A function counts once a stack however often it is on it, and wherever in it it stands; its
    line is dropped. ``own`` is the share of samples with it innermost. Lines that are not of the
    form, as the last of a file that was cut off, are left out.
    """
    totals: Counter[str] = Counter()
    on: Counter[tuple[str, str]] = Counter()
    own: Counter[tuple[str, str]] = Counter()
    for line in lines:
        stack, _, count = line.strip().rpartition(" ")
        if not stack or not count.isdecimal():
            continue
        frames = stack.split(";")
        thread = ALL
        while frames and _THREAD.match(frames[0]):
            thread = frames.pop(0)
        names = [_LINE.sub(")", frame) for frame in frames]
        totals[thread] += int(count)
        # Each once; of equal counts the outermost is listed first.
        for name in dict.fromkeys(names):
            on[thread, name] += int(count)
        if names:
            own[thread, names[-1]] += int(count)
    rows = []
    for thread, total in totals.most_common():
        mine = Counter({name: seen for (where, name), seen in on.items() if where == thread})
        rows += [
            {
                "thread": thread,
                "function": name,
                "share": seen / total,
                "own": own[thread, name] / total,
                "samples": seen,
            }
            for name, seen in mine.most_common(top)
        ]
    return rows
