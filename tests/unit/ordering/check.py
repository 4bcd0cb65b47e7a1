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

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import maxsize
from typing import NamedTuple

from tests.unit.ordering.trace import Entry, Operation, Site, Span, Trace

Actor = int
"""A stream, or the host: it does its operations in order, and counts them."""
HOST: Actor = -1


class Access(NamedTuple):
    """One use of memory: the bytes, what uses them, and its number on its stream."""

    span: Span
    writes: bool
    number: int
    by: Operation


@dataclass(frozen=True)
class Race:
    """``second`` may run before ``first`` is over, and one of them writes ``span``."""

    first: Operation
    second: Operation
    span: Span
    writes: bool
    """Whether ``second`` writes; else ``first`` does."""

    def described(self, trace: Trace) -> str:
        """Both operations, their streams and places, and the bytes."""
        second, first = (
            f"{by.name} at {by.site} on {trace.streams[by.stream]}"
            for by in (self.second, self.first)
        )
        does = "writes" if self.writes else "reads"
        return (
            f"{second} {does} bytes {self.span.start} to {self.span.stop} of a storage without "
            f"waiting for {first}"
        )


def races(entries: Sequence[Entry], *, without: Collection[Site] = ()) -> list[Race]:
    """Check entries in the order of the host; those at the places ``without`` are left out."""
    check, left_out = Check(), frozenset(without)
    for entry in entries:
        if entry.at not in left_out:
            getattr(check, entry.act)(*entry.given)
    return check.found


class Check:
    """Vector clocks: how much of each actor is over before the next operation of another.

    L. Lamport, 1978; F. Mattern and C. Fidge, 1988.
    """

    def __init__(self) -> None:
        self.found: list[Race] = []
        self._clocks: dict[Actor, dict[Actor, int]] = defaultdict(lambda: defaultdict(int))
        self._events: dict[int, Mapping[Actor, int]] = {}
        self._uses: dict[int, list[Access]] = defaultdict(list)
        """Of each storage, without those that a later one covers and comes after."""
        self._owners: dict[int, Actor] = {}
        self._kept: dict[int, set[Actor]] = defaultdict(set)
        self._given_back: dict[Actor, list[Access]] = defaultdict(list)
        """What memory that was given back on a stream may still be busy with."""

    def record(self, event: int, stream: Actor) -> None:
        """From now on ``event`` stands for all that was put on ``stream`` until now."""
        self._events[event] = dict(self._joined(stream, self._clocks[HOST]))

    def wait(self, stream: Actor, event: int) -> None:
        """What is put on ``stream`` from now on waits for ``event``."""
        self._joined(stream, self._events.get(event, {}))[stream] += 1

    def host_waits(self, event: int | None = None) -> None:
        """The host waits for an event, or, where none is given, for the device."""
        clocks = [clock for actor, clock in self._clocks.items() if actor != HOST]
        for clock in clocks if event is None else [self._events.get(event, {})]:
            self._joined(HOST, clock)

    def launch(self, by: Operation, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """A kernel or a collective is put at the end of its stream."""
        clock = self._joined(by.stream, self._clocks[HOST])
        clock[by.stream] += 1
        for spans, is_write in ((reads, False), (writes, True)):
            for span in spans:
                self._use(Access(span, is_write, clock[by.stream], by))

    def allocate(self, storage: int, by: Operation) -> None:
        """A storage gets memory of the caching allocator, that of a stream.

        Which block it gets depends on sizes and on what came before. So the worst is assumed: it
        may be any memory that was given back on its stream.
        """
        clock, whole = self._clocks[by.stream], Span(storage, 0, maxsize)
        busy = [use for use in self._given_back[by.stream] if not self._is_over(use, by.stream)]
        self._given_back[by.stream], self._owners[storage] = busy, by.stream
        # Every use has to come after what the stream has done so far.
        made = Access(whole, True, clock[by.stream], by)
        self._uses[storage] = [made, *(use._replace(span=whole, writes=False) for use in busy)]

    def release(self, storage: int) -> None:
        """A storage gives its memory back to the caching allocator."""
        uses, kept = self._uses.pop(storage, []), self._kept.pop(storage, set())
        owner = self._owners.pop(storage, None)
        if owner is None:
            return  # It was there before the trace began.
        found = [*self._given_back[owner]]
        for use in uses:
            if use.by.stream != owner and not any(self._is_over(use, one) for one in kept):
                found.append(use)
        latest = {use.by.stream: use for use in sorted(found, key=lambda one: one.number)}
        self._given_back[owner] = [*latest.values()]

    def keep(self, storage: int, stream: Actor) -> None:
        """``record_stream``: memory is not given out again while ``stream`` may use it."""
        self._kept[storage].add(stream)

    def _joined(self, actor: Actor, clock: Mapping[Actor, int]) -> dict[Actor, int]:
        """The clock of ``actor``, which continues only after all that ``clock`` knows."""
        own = self._clocks[actor]
        for other, number in clock.items():
            own[other] = max(own[other], number)
        return own

    def _is_over(self, use: Access, actor: Actor) -> bool:
        """Whether the next operation of ``actor`` comes after that use."""
        return self._clocks[actor][use.by.stream] >= use.number

    def _use(self, new: Access) -> None:
        uses = self._uses[new.span.storage]
        for first, where in _overlapping(uses, new.span):
            if (first.writes or new.writes) and not self._is_over(first, new.by.stream):
                self.found.append(Race(first.by, new.by, where, new.writes))
        uses[:] = [use for use in uses if not _replaces(new, use)]
        uses.append(new)


def _overlapping(uses: Sequence[Access], span: Span) -> Iterator[tuple[Access, Span]]:
    for use in uses:
        start, stop = max(use.span.start, span.start), min(use.span.stop, span.stop)
        if start < stop:
            yield use, Span(span.storage, start, stop)


def _replaces(new: Access, old: Access) -> bool:
    """Whether all that comes after ``new`` comes after ``old`` too, unless that was a race."""
    covers = new.span.start <= old.span.start and old.span.stop <= new.span.stop
    return covers and (new.writes or (not old.writes and old.by.stream == new.by.stream))
