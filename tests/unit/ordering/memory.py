"""The last uses of bytes: of each storage, and of memory returned to the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.unit.ordering.clocks import Actor
from tests.unit.ordering.trace import Allocate, Launch, Span


class Access(NamedTuple):
    """One use of memory: by which stream, the number of its operation there, and what it was."""

    stream: Actor
    number: int
    by: Launch | Allocate


@dataclass
class Piece:
    """Bytes with one history."""

    start: int
    stop: int
    write: Access | None = None
    reads: dict[Actor, Access] = field(default_factory=dict)
    """The last read of each stream since ``write``."""

    def part(self, start: int, stop: int) -> Piece:
        """The history of some of these bytes, which continues separately."""
        return Piece(start, stop, self.write, dict(self.reads))


class Storage:
    """The history of one storage.

    Args:
        write: the allocation, if it was seen.
        reads: what may still use its memory.
    """

    def __init__(self, write: Access | None = None, reads: dict[Actor, Access] | None = None):
        self._fresh = Piece(0, 0, write, reads or {})
        self._pieces: list[Piece] = []

    def pieces(self, span: Span) -> list[Piece]:
        """The pieces of exactly these bytes, cut where needed."""
        before, inside, after = [], [], []
        at = span.start
        for piece in self._pieces:
            if piece.stop <= span.start:
                before.append(piece)
            elif piece.start >= span.stop:
                after.append(piece)
            else:
                if piece.start < span.start:
                    before.append(piece.part(piece.start, span.start))
                start, stop = max(piece.start, span.start), min(piece.stop, span.stop)
                if at < start:
                    inside.append(self._fresh.part(at, start))
                inside.append(piece.part(start, stop))
                at = stop
                if piece.stop > span.stop:
                    after.append(piece.part(span.stop, piece.stop))
        if at < span.stop:
            inside.append(self._fresh.part(at, span.stop))
        self._pieces = [*before, *inside, *after]
        return inside

    def last_uses(self) -> Iterator[Access]:
        """All uses that a new owner of this memory has to wait for."""
        for piece in (self._fresh, *self._pieces):
            if piece.write is not None:
                yield piece.write
            yield from piece.reads.values()


class Allocator:
    """Memory that was given back, by the stream that it belongs to.

    Which block a storage gets depends on sizes and on what came before. So the worst is assumed: a
    new storage may get any memory that was given back on its stream.
    """

    def __init__(self) -> None:
        self._given_back: dict[Actor, list[Access]] = {}

    def give_back(self, stream: Actor, uses: Iterator[Access]) -> None:
        """Memory of ``stream`` that ``uses`` may still be busy with."""
        kept = {(use.stream, use.number): use for use in uses}
        latest: dict[Actor, Access] = {}
        for use in (*self._given_back.get(stream, ()), *kept.values()):
            if use.stream not in latest or latest[use.stream].number < use.number:
                latest[use.stream] = use
        self._given_back[stream] = list(latest.values())

    def give_out(self, stream: Actor, is_over: Callable[[Access], bool]) -> dict[Actor, Access]:
        """What may still use memory that is given out now; what is over is forgotten."""
        busy = [use for use in self._given_back.get(stream, ()) if not is_over(use)]
        self._given_back[stream] = busy
        return {use.stream: use for use in busy}
