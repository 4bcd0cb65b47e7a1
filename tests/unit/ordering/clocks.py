"""Vector clocks: how much of each stream's work is known to be over at any point.

An *actor* does its operations in order: a stream, or the host. Each counts its own. The clock of an
actor holds, for every actor, the last operation that is over before its own next one begins
(L. Lamport, 1978; F. Mattern and C. Fidge, 1988).
"""

from __future__ import annotations

from collections.abc import Mapping

Actor = int
Clock = Mapping[Actor, int]
HOST: Actor = -1


class Clocks:
    """The clocks of all actors, which know nothing of each other at first."""

    def __init__(self) -> None:
        self._now: dict[Actor, dict[Actor, int]] = {}
        self._launched: dict[Actor, dict[Actor, int]] = {}

    def tick(self, actor: Actor) -> int:
        """``actor`` does an operation; returns its number."""
        clock = self._of(actor)
        clock[actor] = clock.get(actor, 0) + 1
        self._launched[actor] = dict(clock)
        return clock[actor]

    def count(self, actor: Actor) -> int:
        """The number of the last operation of ``actor``; 0 before the first one."""
        return self._of(actor).get(actor, 0)

    def join(self, actor: Actor, clock: Clock) -> None:
        """``actor`` continues only after all that ``clock`` knows."""
        own = self._of(actor)
        for other, count in clock.items():
            if count > own.get(other, 0):
                own[other] = count

    def now(self, actor: Actor) -> Clock:
        """A copy of the clock of ``actor``."""
        return dict(self._of(actor))

    def knows(self, actor: Actor, other: Actor, count: int) -> bool:
        """Whether the next operation of ``actor`` comes after that one of ``other``."""
        return self._of(actor).get(other, 0) >= count

    def knew(self, actor: Actor, other: Actor, count: int) -> bool:
        """Whether the last operation of ``actor`` came after that one of ``other``."""
        return self._launched.get(actor, {}).get(other, 0) >= count

    def _of(self, actor: Actor) -> dict[Actor, int]:
        return self._now.setdefault(actor, {})
