"""Defines the result of a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from megatron_cg.errors import Violation

FORMAT = 1
"""Version of the JSON; increases when a name in it changes its meaning or is removed."""


class Level(StrEnum):
    """The severity of a finding; only ERROR means that the run is impossible."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report: the fact, why it matters, and what to type."""

    level: Level
    found: str
    why: str = ""
    remedy: str = ""
    check: str = ""
    """The name of the check, set when findings are collected."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON, the check first."""
        return {"check": self.check, **asdict(self)}


class NotReachedError(Exception):
    """A check has nothing to inspect, for a reason that another check reports."""


def ok(found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, found)


def note(found: str, why: str, remedy: str = "") -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, found, why, remedy)


def warning(found: str, why: str, remedy: str) -> Finding:
    """Graphs can run, but something will probably be slow, different or an obstacle."""
    return Finding(Level.WARNING, found, why, remedy)


def error(found: str, why: str, remedy: str) -> Finding:
    """The requested run is impossible."""
    return Finding(Level.ERROR, found, why, remedy)


def of_violation(violation: Violation) -> Finding:
    """An error for a broken rule of a run."""
    return error(violation.found, violation.reason, violation.remedy.removeprefix("type "))
