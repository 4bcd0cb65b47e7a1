"""The system to check, what the other process found in it, and the result of a check."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import TRANSFORMER_ENGINE

SECONDS = 300.0
"""Time limit of the other process; imports from a cold network disk take minutes."""
_ROOT = Path(__file__).resolve().parents[3]
Answers = dict[str, dict[str, Any]]
"""By stage of ``probe.py``: ``{"found": ...}``, or ``{"error": text}``."""


class Level(StrEnum):
    """The severity of a finding; only ERROR means that the run is impossible."""

    ERROR = "error"
    WARNING = "warning"
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


ok, warning, error = (partial(Finding, level) for level in (Level.OK, Level.WARNING, Level.ERROR))


@dataclass(frozen=True)
class System:
    """Everything that checks read, so that no check reads the machine itself."""

    answers: Answers
    backend: str = TRANSFORMER_ENGINE
    variables: Mapping[str, str] = field(default_factory=dict)

    def told(self, stage: str) -> Any:
        """What the other process found at a stage; None if it failed or was not run."""
        return self.answers.get(stage, {}).get("found")


def run_probe(backend: str, variables: Mapping[str, str], seconds: float = SECONDS) -> Answers:
    """The answers of the other process, as far as it got.

    If it ended during a stage, by a signal or by the time limit, that stage has an error that says
    so; later stages are missing.
    """
    answers: Answers = {"machine": {}}
    paths = filter(None, [variables.get("PYTHONPATH", ""), str(_ROOT)])
    env = {**variables, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="megatron-cg-doctor-") as folder:
        out, log = Path(folder, "answers"), Path(folder, "log")
        words = [sys.executable, "-P", "-m", "megatron_cg.tools.doctor.probe", str(out), backend]
        with log.open("wb") as file:
            streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
            end = "ended early"
            try:
                subprocess.run(words, check=True, env=env, timeout=seconds, **streams)
            except subprocess.SubprocessError as failure:
                end = str(failure)
        # A line that the end of the process cut short is left out.
        with suppress(FileNotFoundError, ValueError):
            for line in out.read_text(encoding="utf-8").splitlines():
                answers |= json.loads(line)
        said = log.read_text(errors="replace").strip()[-600:]
    for stage in [name for name, answer in answers.items() if not answer]:
        answers[stage] = {"error": f"the process that looks: {end} It said last: {said}"}
    return answers
