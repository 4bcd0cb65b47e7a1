"""The time that votes cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class AgreementTime:
    """Time that votes cost this rank's main thread, in milliseconds, summed over all votes."""

    votes: int = 0
    issuing_ms: float = 0.0
    """Posting asynchronous votes."""
    waiting_ms: float = 0.0
    """Waiting for the last rank; for asynchronous votes, the time blocked in ``collect``."""
    exchanging_ms: float = 0.0
    """Exchanging votes once all ranks have arrived, and objects; synchronous votes only."""

    def as_dict(self) -> dict[str, float]:
        """The values by field name."""
        return asdict(self)

    def text(self) -> str:
        """The values in one readable line."""
        return (
            f"{self.votes} votes: {self.issuing_ms:.1f} ms posting, {self.waiting_ms:.1f} ms "
            f"waiting, {self.exchanging_ms:.1f} ms exchanging"
        )

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to the field ``name``, also when the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = (time.perf_counter() - start) * 1e3
            setattr(self, name, getattr(self, name) + spent)
