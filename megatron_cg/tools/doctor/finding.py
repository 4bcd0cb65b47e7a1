"""What a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_cg.errors import Violation

FORMAT = 1
"""Of the JSON; grows when a name in it changes its meaning or goes."""


class Level(StrEnum):
    """How much a finding matters; only ERROR says that the run asked about cannot be."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was found, why it matters, and what to type."""

    level: Level
    found: str
    why: str = ""
    remedy: str = ""
    check: str = ""
    """The name of the check, which puts it in as it collects."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON."""
        return {
            "check": self.check,
            "level": self.level.value,
            "found": self.found,
            "why": self.why,
            "remedy": self.remedy,
        }


class NotReachedError(Exception):
    """A check has nothing to look at, for a reason that another check reports."""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, found)


def note(found: str, why: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, found, why, remedy)


def warning(found: str, why: str, remedy: str) -> Finding:
    """Graphs can run, and something will likely be slow, different or in the way."""
    return Finding(Level.WARNING, found, why, remedy)


def error(found: str, why: str, remedy: str) -> Finding:
    """The run that was asked about cannot be."""
    return Finding(Level.ERROR, found, why, remedy)


def of_violation(violation: Violation) -> Finding:
    """A broken rule of a run, which is an error."""
    return error(violation.found, violation.reason, violation.remedy.removeprefix("type "))
