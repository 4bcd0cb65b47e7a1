"""What a program asked of the device, in the order in which the host asked for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.unit.ordering.clocks import Actor


class Site(NamedTuple):
    """Where a call stands: a file, relative to its package's parent, and a place in it."""

    file: str
    line: int
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Span(NamedTuple):
    """Bytes ``start`` to ``stop`` of one storage, named by its number in the trace."""

    storage: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or a collective, put at the end of a stream."""

    stream: Actor
    name: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """From now on ``event`` represents all that was put on ``stream`` until now."""

    event: int
    stream: Actor
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """What is put on ``stream`` from now on waits for ``event``."""

    stream: Actor
    event: int
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class AwaitStream:
    """What is put on ``stream`` from now on waits for all that was put on ``other``."""

    stream: Actor
    other: Actor
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class HostAwaits:
    """The host waits for an event, for a stream, or, where neither is given, for the device."""

    event: int | None = None
    stream: Actor | None = None
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class HostReads:
    """The host waits for ``stream`` since it reads a value."""

    stream: Actor
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Allocate:
    """A storage gets memory of the caching allocator, that of ``stream``."""

    storage: int
    stream: Actor
    name: str = "an allocation"
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """A storage gives its memory back to the caching allocator."""

    storage: int


@dataclass(frozen=True, slots=True)
class Keep:
    """``record_stream``: the memory is not given out again while ``stream`` may use it."""

    storage: int
    stream: Actor
    site: Site | None = None


Entry = Launch | Record | Await | AwaitStream | HostAwaits | HostReads | Allocate | Release | Keep


@dataclass
class Trace:
    """Entries in order, and the names of streams and storages."""

    entries: list[Entry] = field(default_factory=list)
    streams: dict[Actor, str] = field(default_factory=dict)
    storages: dict[int, str] = field(default_factory=dict)

    def waits(self) -> dict[Site, int]:
        """How often each place in the code ordered something."""
        found: dict[Site, int] = {}
        for entry in self.entries:
            site = ordered_at(entry)
            if site is not None:
                found[site] = found.get(site, 0) + 1
        return found


def ordered_at(entry: Entry) -> Site | None:
    """The place of an entry that only orders others; None for other entries."""
    if isinstance(entry, Record | Await | AwaitStream | HostAwaits | Keep):
        return entry.site
    return None
