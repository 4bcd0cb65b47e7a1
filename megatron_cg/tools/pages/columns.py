"""Facts and command lines of several runs, side by side. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

Rows = list[list[str]]


def parted(rows: Rows) -> dict[str, Rows]:
    """``different``: the rows whose values are not all equal; ``same``: the others, with one value.

    A row is a name, and its value in each run.
    """
    different = [row for row in rows if len(set(row[1:])) > 1]
    return {"different": different, "same": [row[:2] for row in rows if row not in different]}


def own_words(lines: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """Each run's name, command line and, of several, the words that only this one has."""
    found = []
    for name, line in lines.items():
        others = {word for other, words in lines.items() if other != name for word in words}
        own = [word for word in line if word not in others] if len(lines) > 1 else []
        found.append((name, shlex.join(line) or "not recorded", shlex.join(own)))
    return found
