"""The rows of a graph's inputs and memory, and what they find; see ``replay/depends_on.py``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mismatch:
    """What a guard found: ``subject`` was ``expected`` at capture, and is ``actual`` now."""

    clause: str
    """The guard's clause that found it, such as ``shape`` or ``address``."""
    subject: str
    """What it is about, such as ``argument hidden_states``."""
    expected: str
    actual: str
    cause: str
    """The likely cause, and what to type or do instead."""

    @property
    def key(self) -> tuple[str, str]:
        """Mismatches with equal keys are reported only once."""
        return self.clause, self.subject

    def text(self, layer: str) -> str:
        """The full description in one line, for the log or an error."""
        return (
            f"{layer}: {self.subject} was {self.expected} at capture and "
            f"is {self.actual} now ({self.clause}). {self.cause}"
        )
