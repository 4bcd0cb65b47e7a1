"""What a program asked of the device, in the order in which the host asked for it."""

import ast
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import megatron_cg

_PACKAGE = Path(megatron_cg.__file__).parent
_NOT_CALLERS = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).with_name(name)) for name in ("trace.py", "device.py")),
    *(str(_PACKAGE / "tape" / name) for name in ("fakes.py", "tape_backend.py")),
    "<",
)
ORDERING = frozenset(
    {"wait_stream", "wait_event", "record_event", "record", "wait", "synchronize", "record_stream"}
)
"""Methods of streams, events, tensors and works that order something."""


class Site(NamedTuple):
    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> Site | None:
    """The innermost call that is none of torch's, of a tape's or of the doubles' of CUDA."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_passed_over(frame.f_code.co_filename):
            return _site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


@cache
def _is_passed_over(file: str) -> bool:
    return file.startswith(_NOT_CALLERS) or file.endswith("/contextlib.py")


@cache
def _site(code: CodeType, instruction: int) -> Site:
    line, _, column, _ = list(code.co_positions())[instruction // 2]
    return Site(str(Path(code.co_filename).resolve()), line or 0, column or 0)


def ordering_places(file: Path) -> Iterator[tuple[Site, str]]:
    """Where a source file names one of :data:`ORDERING`, with the text of the call.

    All methods with these names are found, also of other objects, and names passed as arguments.
    """
    tree = ast.parse(file.read_text())
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ORDERING:
            place = calls.get(id(node), node)
            yield Site(str(file.resolve()), place.lineno, place.col_offset), ast.unparse(place)


class Span(NamedTuple):
    """Bytes ``start`` to ``stop`` of one storage, named by its number in the trace."""

    storage: int
    start: int
    stop: int


class Operation(NamedTuple):
    """A kernel, a collective or an allocation: on which stream, what it is, and where it is."""

    stream: int
    name: str
    site: Site | None


class Entry(NamedTuple):
    """One thing that was asked for: a method of ``check.Check``, and what that is given.

    ``at`` is the place of what only orders others.
    """

    act: str
    given: tuple[Any, ...]
    at: Site | None


@dataclass
class Trace:
    """Entries in order while it is ``on``, names of streams, and numbers of live storages."""

    entries: list[Entry] = field(default_factory=list)
    streams: dict[int, str] = field(default_factory=dict)
    on: bool = False
    _numbers: Iterator[int] = field(default_factory=count)
    _known: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = field(default_factory=dict)
    """By the address of torch's object, which another storage may get once it is gone."""

    def add(self, act: str, *given: Any, at: Site | None = None) -> None:
        if self.on:
            self.entries.append(Entry(act, given, at))

    @contextmanager
    def switched(self, *, on: bool) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The storage's number, for as long as it exists; its end is recorded."""
        key = storage._cdata
        if key in self._known:
            return self._known[key][0]
        number = next(self._numbers)

        def gone(_reference: object) -> None:
            self._known.pop(key, None)
            self.add("release", number)

        self._known[key] = number, weakref.ref(storage, gone)
        return number

    def spans_of(self, tensors: Sequence[torch.Tensor]) -> list[Span]:
        return [span for tensor in tensors if (span := self.span_of(tensor)) is not None]

    def span_of(self, tensor: torch.Tensor) -> Span | None:
        """The bytes from the first to the last one that ``tensor`` uses, or None where none."""
        if not tensor.is_cpu or tensor.numel() == 0:
            return None
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = sum((size - 1) * step for size, step in steps)
        start = int(tensor.storage_offset()) * tensor.itemsize
        number = self.number_of(tensor.untyped_storage())
        return Span(number, start, start + (reach + 1) * tensor.itemsize)
