"""Happens-before over a trace: two uses of the same bytes, one of them a write, without an order.

What is known of CUDA and its caching allocator, and used here:

* a stream runs its operations in order; two streams have no order but by events;
* an operation begins after all that the host has waited for before it launched it;
* waiting for an event waits for what was on its stream when it was last recorded, and for nothing
  if it was never recorded;
* a storage belongs to the stream that was current when it was allocated, and once it is released
  its memory may be given out again on that stream at once. Only a wait of that stream, or
  ``record_stream``, orders what another stream still does with it before that.

A read of a value on the host also waits. That is not used: such reads often happen to be there (a
loss is logged), and no order should depend on them.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from tests.unit.ordering.trace import (
    Allocate,
    Await,
    Entry,
    HostAwaits,
    Keep,
    Launch,
    Record,
    Release,
    Site,
    Span,
    Trace,
    ordered_at,
)

Actor = int
"""A stream, or the host: it does its operations in order, and counts them."""
Clock = Mapping[Actor, int]
HOST: Actor = -1


class _Clocks:
    """Vector clocks: for every actor, how much of each other is over before its next operation.

    L. Lamport, 1978; F. Mattern and C. Fidge, 1988.
    """

    def __init__(self) -> None:
        self._now: dict[Actor, dict[Actor, int]] = defaultdict(dict)
        self._launched: dict[Actor, dict[Actor, int]] = {}

    def tick(self, actor: Actor) -> int:
        clock = self.now(actor)
        clock[actor] = clock.get(actor, 0) + 1
        self._launched[actor] = dict(clock)
        return clock[actor]

    def join(self, actor: Actor, clock: Clock) -> None:
        """``actor`` continues only after all that ``clock`` knows."""
        own = self.now(actor)
        for other, number in clock.items():
            if number > own.get(other, 0):
                own[other] = number

    def now(self, actor: Actor) -> dict[Actor, int]:
        return self._now[actor]

    def knows(self, actor: Actor, other: Actor, number: int) -> bool:
        """Whether the next operation of ``actor`` comes after that one of ``other``."""
        return self.now(actor).get(other, 0) >= number

    def knew(self, actor: Actor, other: Actor, number: int) -> bool:
        """Whether the last operation of ``actor`` came after that one of ``other``."""
        return self._launched.get(actor, {}).get(other, 0) >= number


class Access(NamedTuple):
    """One use of memory: by which stream, the number of its operation there, and what it was."""

    stream: Actor
    number: int
    by: Launch | Allocate


@dataclass
class Piece:
    start: int
    stop: int
    write: Access | None = None
    reads: dict[Actor, Access] = field(default_factory=dict)
    """The last read of each stream since ``write``."""


class Storage:
    """The history of one storage.

    Args:
        bounds: where the pieces begin and end that have one history each.
        write: the allocation, if it was seen.
        reads: what may still use its memory.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        write: Access | None = None,
        reads: Mapping[Actor, Access] | None = None,
    ) -> None:
        self._bounds = bounds
        self._pieces = [Piece(*ends, write, dict(reads or {})) for ends in pairwise(bounds)]

    def pieces(self, span: Span) -> list[Piece]:
        start = bisect_left(self._bounds, span.start)
        return self._pieces[start : bisect_left(self._bounds, span.stop, start)]

    def last_uses(self) -> Iterator[Access]:
        for piece in self._pieces:
            if piece.write is not None:
                yield piece.write
            yield from piece.reads.values()


class _Allocator:
    """Memory that was given back, by the stream that it belongs to.

    Which block a storage gets depends on sizes and on what came before. So the worst is assumed: a
    new storage may get any memory that was given back on its stream.
    """

    def __init__(self) -> None:
        self._given_back: dict[Actor, list[Access]] = {}

    def give_back(self, stream: Actor, uses: Iterator[Access]) -> None:
        """Memory of ``stream`` that ``uses`` may still be busy with."""
        latest: dict[Actor, Access] = {}
        for use in (*self._given_back.get(stream, ()), *uses):
            if use.stream not in latest or latest[use.stream].number < use.number:
                latest[use.stream] = use
        self._given_back[stream] = list(latest.values())

    def give_out(self, stream: Actor, is_over: Callable[[Access], bool]) -> dict[Actor, Access]:
        """What may still use memory that is given out now; what is over is forgotten."""
        busy = [use for use in self._given_back.get(stream, ()) if not is_over(use)]
        self._given_back[stream] = busy
        return {use.stream: use for use in busy}


@dataclass(frozen=True)
class Race:
    """``second`` may run before ``first`` is over. The bytes are those that ``second`` uses."""

    first: Launch | Allocate
    second: Launch
    span: Span
    writes: bool
    """Whether ``second`` writes them; else ``first`` does."""

    def described(self, trace: Trace) -> str:
        """Both operations, their streams and places, and the memory's name."""
        does = "writes" if self.writes else "reads"
        memory = trace.storages.get(self.span.storage, "memory of its own")
        second, first = (
            f"{'an allocation for ' if isinstance(by, Allocate) else ''}{by.name} at {by.site} on "
            f"{trace.streams[by.stream]}"
            for by in (self.second, self.first)
        )
        return (
            f"{second} {does} bytes {self.span.start} to {self.span.stop} of {memory} without "
            f"waiting for {first}"
        )


def races(entries: Sequence[Entry], *, without: Collection[Site] = ()) -> list[Race]:
    """Check entries in the order of the host; those at the places ``without`` are left out."""
    ends: dict[int, set[int]] = defaultdict(set)
    for launch in (entry for entry in entries if isinstance(entry, Launch)):
        for span in (*launch.reads, *launch.writes):
            ends[span.storage].update((span.start, span.stop))
    check = _Check({storage: sorted(found) for storage, found in ends.items()})
    left_out = frozenset(without)
    for entry in entries:
        if ordered_at(entry) not in left_out:
            check.take(entry)
    return check.found


class _Check:
    def __init__(self, bounds: Mapping[int, Sequence[int]]) -> None:
        self.found: list[Race] = []
        self._bounds = bounds
        self._clocks = _Clocks()
        self._events: dict[int, Clock] = {}
        self._storages: dict[int, Storage] = {}
        self._owners: dict[int, int] = {}
        self._kept: dict[int, set[int]] = {}
        self._allocator = _Allocator()
        self._streams: set[int] = set()

    def take(self, entry: Entry) -> None:
        match entry:
            case Launch():
                self._launch(entry)
            case Record(event, stream):
                self._events[event] = self._over(stream)
            case Await(stream, event):
                self._clocks.join(stream, self._events.get(event, {}))
            case HostAwaits(event) if event is not None:
                self._clocks.join(HOST, self._events.get(event, {}))
            case HostAwaits():
                for stream in self._streams:
                    self._clocks.join(HOST, self._over(stream))
            case Allocate():
                self._allocate(entry)
            case Release(storage):
                self._release(storage)
            case Keep(storage, stream):
                self._kept.setdefault(storage, set()).add(stream)

    def _over(self, stream: int) -> Clock:
        """What is over after all that is on ``stream``."""
        self._clocks.join(stream, self._clocks.now(HOST))
        return dict(self._clocks.now(stream))

    def _launch(self, entry: Launch) -> None:
        self._streams.add(entry.stream)
        self._clocks.join(entry.stream, self._clocks.now(HOST))
        access = Access(entry.stream, self._clocks.tick(entry.stream), entry)
        for span in entry.reads:
            for piece in self._pieces(span):
                self._after(piece.write, access, piece, span, writes=False)
                piece.reads[entry.stream] = access
        for span in entry.writes:
            for piece in self._pieces(span):
                for earlier in (piece.write, *piece.reads.values()):
                    self._after(earlier, access, piece, span, writes=True)
                piece.write, piece.reads = access, {}

    def _pieces(self, span: Span) -> list[Piece]:
        if span.storage not in self._storages:  # It was there before the trace began.
            self._storages[span.storage] = Storage(self._bounds[span.storage])
        return self._storages[span.storage].pieces(span)

    def _after(
        self, first: Access | None, second: Access, piece: Piece, span: Span, *, writes: bool
    ) -> None:
        if first is None or self._clocks.knows(second.stream, first.stream, first.number):
            return
        assert isinstance(second.by, Launch)
        where = Span(span.storage, piece.start, piece.stop)
        self.found.append(Race(first.by, second.by, where, writes))

    def _allocate(self, entry: Allocate) -> None:
        stream = entry.stream
        self._streams.add(stream)
        busy = self._allocator.give_out(
            stream, lambda use: self._clocks.knew(stream, use.stream, use.number)
        )
        # Every use has to come after what its stream has done so far.
        made = Access(stream, self._clocks.now(stream).get(stream, 0), entry)
        self._storages[entry.storage] = Storage(self._bounds.get(entry.storage, ()), made, busy)
        self._owners[entry.storage] = stream

    def _release(self, storage: int) -> None:
        history = self._storages.pop(storage, None)
        owner = self._owners.pop(storage, None)
        kept = self._kept.pop(storage, set())
        if history is None or owner is None:
            return  # It was not used, or was there before the trace began.
        self._allocator.give_back(
            owner,
            (
                use
                for use in history.last_uses()
                if use.stream != owner
                and not any(self._clocks.knows(other, use.stream, use.number) for other in kept)
            ),
        )
