"""A race in words."""

from __future__ import annotations

from tests.unit.ordering.check import Race
from tests.unit.ordering.trace import Allocate, Launch, Trace


def described(trace: Trace, races: list[Race]) -> list[str]:
    """Each pair of operations once: both, their streams and places, and the memory's name."""
    return list(dict.fromkeys(_sentence(trace, race) for race in races))


def _sentence(trace: Trace, race: Race) -> str:
    does = "writes" if race.writes else "reads"
    memory = trace.storages.get(race.span.storage, "memory of its own")
    return (
        f"{_operation(trace, race.second)} {does} bytes {race.span.start} to {race.span.stop} of "
        f"{memory} without waiting for {_operation(trace, race.first)}"
    )


def _operation(trace: Trace, one: Launch | Allocate) -> str:
    kind = "an allocation for " if isinstance(one, Allocate) else ""
    return f"{kind}{one.name} at {one.site} on {trace.streams[one.stream]}"
