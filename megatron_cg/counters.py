"""How often graphs were captured and replayed, per session."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Counts of one session, each a number of forward passes of a layer."""

    captured: int = 0
    """Graphed layers that capture made."""
    replayed: int = 0
    """Forward passes that were a replay."""
    eager: int = 0
    """Forward passes of a graphed layer that took the eager path (evaluation, for one)."""

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)

    def expect(self, **counts: int) -> None:
        """Raise AssertionError unless the named counts are as given; for tests."""
        found = {name: getattr(self, name) for name in counts}
        if found != counts:
            raise AssertionError(f"counters are {self.as_dict()}, expected {counts}")
