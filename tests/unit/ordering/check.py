"""Happens-before over a trace: two uses of the same bytes, one of them a write, without an order.

What is known of CUDA and its caching allocator, and used here:

* a stream runs its operations in order; two streams have no order but by events;
* an operation begins after all that the host has waited for before it launched it;
* waiting for an event waits for what was on its stream when it was last recorded, and for nothing
  if it was never recorded;
* a storage belongs to the stream that was current when it was allocated, and once it is released
  its memory may be given out again on that stream at once. Only a wait of that stream, or
  ``record_stream``, orders what another stream still does with it before that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tests.unit.ordering.clocks import HOST, Clock, Clocks
from tests.unit.ordering.memory import Access, Allocator, Piece, Storage
from tests.unit.ordering.trace import (
    Allocate,
    Await,
    AwaitStream,
    Entry,
    HostAwaits,
    HostReads,
    Keep,
    Launch,
    Record,
    Release,
    Site,
    Span,
    ordered_at,
)


@dataclass(frozen=True)
class Race:
    """``second`` may run before ``first`` is over. The bytes are those that ``second`` uses."""

    first: Launch | Allocate
    second: Launch
    span: Span
    writes: bool
    """Whether ``second`` writes them; else ``first`` does."""


def races(
    entries: Iterable[Entry],
    *,
    without: Collection[Site] = (),
    reads_order: bool = False,
) -> list[Race]:
    """Check a trace.

    Args:
        entries: in the order of the host.
        without: waits, records and ``record_stream``s at these places are taken as absent.
        reads_order: whether a read of a value on the host counts as a wait. Such reads often happen
            to be there (a loss is logged), and no order should depend on them.
    """
    check = _Check(reads_order)
    left_out = frozenset(without)
    for entry in entries:
        if not left_out or ordered_at(entry) not in left_out:
            check.take(entry)
    return check.found


class _Check:
    def __init__(self, reads_order: bool) -> None:
        self.found: list[Race] = []
        self._reads_order = reads_order
        self._clocks = Clocks()
        self._events: dict[int, Clock] = {}
        self._storages: dict[int, Storage] = {}
        self._owners: dict[int, int] = {}
        self._kept: dict[int, set[int]] = {}
        self._allocator = Allocator()
        self._streams: set[int] = set()

    def take(self, entry: Entry) -> None:  # noqa: PLR0912 - one case an entry
        match entry:
            case Launch():
                self._launch(entry)
            case Record(event, stream):
                self._events[event] = self._now(stream)
            case Await(stream, event):
                self._clocks.join(stream, self._events.get(event, {}))
            case AwaitStream(stream, other):
                self._clocks.join(stream, self._now(other))
            case HostReads(stream):
                if self._reads_order:
                    self._clocks.join(HOST, self._now(stream))
            case HostAwaits(None, None):
                for stream in self._streams:
                    self._clocks.join(HOST, self._now(stream))
            case HostAwaits(None, stream) if stream is not None:
                self._clocks.join(HOST, self._now(stream))
            case HostAwaits(event):
                self._clocks.join(HOST, self._events.get(event or 0, {}))
            case Allocate():
                self._allocate(entry)
            case Release(storage):
                self._release(storage)
            case Keep(storage, stream):
                self._kept.setdefault(storage, set()).add(stream)

    def _now(self, stream: int) -> Clock:
        """What is over after all that is on ``stream``."""
        self._clocks.join(stream, self._clocks.now(HOST))
        return self._clocks.now(stream)

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
                self._after(piece.write, access, piece, span, writes=True)
                for read in piece.reads.values():
                    self._after(read, access, piece, span, writes=True)
                piece.write, piece.reads = access, {}

    def _pieces(self, span: Span) -> list[Piece]:
        return self._storages.setdefault(span.storage, Storage()).pieces(span)

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
        made = Access(stream, self._clocks.count(stream), entry)
        self._storages[entry.storage] = Storage(made, busy)
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
