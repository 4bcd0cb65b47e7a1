"""What a row of the table of features says, and the lines of other packages that it points to."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path

from megatron_cg.upstream.symbols import changed

CORE, FSDP, TE, TORCH = "megatron-core", "megatron-fsdp", "transformer-engine", "torch"
_TE_SOURCE = "te-source"
"""Where ``make`` puts Transformer Engine's sources: its compiled part needs ``nvcc``."""


class Status(StrEnum):
    """Whether a run with graphs may use a feature."""

    SUPPORTED = "supported"
    SETTING = "supported with another flag"
    UPSTREAM = "refused: the released packages cannot"
    GRAPH = "refused: no CUDA graph can"
    HERE = "refused: not supported here"


@dataclass(frozen=True)
class Line:
    """A line of an installed package, by its text: line numbers move with every release."""

    distribution: str
    file: str
    """Below ``site-packages``."""
    text: str
    """A part of the line that no other line of the file has."""

    def number(self) -> int:
        """The line's number in the installed file.

        Raises UpstreamChangedError if the file is missing, or if not exactly one line has the text.
        """
        found = [number for number, line in enumerate(_lines(self), 1) if self.text in line]
        if len(found) != 1:
            there = f"on {len(found)} lines instead of one"
            raise changed(self.distribution, self.file, f"{self.text!r}, which is {there}")
        return found[0]

    def __str__(self) -> str:
        places = [str(place) for place in _places()]
        found = metadata.distributions(name=self.distribution, path=places)
        return f"{self.distribution} {next(iter(found)).version}: `{self.file}:{self.number()}`"


@dataclass(frozen=True)
class Row:
    """One feature."""

    feature: str
    """Flags as typed, or words."""
    status: Status
    why: str
    """Why it is refused, or how it is supported."""
    rules: tuple[str, ...] = ()
    """The names of the rules that refuse it."""
    tests: tuple[str, ...] = ()
    """Tests that show it, from ``tests``: ``unit/FILE::TEST`` or ``functional/FILE::TEST``."""
    lines: tuple[Line, ...] = ()
    """What the released packages do."""


@cache
def _text(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8").splitlines())


def _places() -> list[Path]:
    return [Path(sys.prefix, _TE_SOURCE), *map(Path, sys.path)]


def _lines(line: Line) -> tuple[str, ...]:
    found = next((file for place in _places() if (file := place / line.file).is_file()), None)
    if found is None:
        raise changed(line.distribution, line.file, "a file of the package")
    return _text(found)
