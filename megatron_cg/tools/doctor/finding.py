"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from megatron_cg.errors import Violation


class Level(StrEnum):
    """The severity of a finding; only ERROR means that the run is impossible."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """What was found, why it matters, and what to type."""

    level: Level
    found: str
    why: str = ""
    remedy: str = ""
    check: str = ""
    """The name of the check, set when findings are collected."""


ok, note = partial(Finding, Level.OK), partial(Finding, Level.NOTE)
warning, error = partial(Finding, Level.WARNING), partial(Finding, Level.ERROR)


def of_violation(violation: Violation) -> Finding:
    """An error for a broken rule of a run."""
    return error(violation.found, violation.reason, violation.remedy.removeprefix("type "))
