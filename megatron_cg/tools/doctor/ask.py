"""Queries another interpreter, so that a crash does not affect this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import TAPE
from megatron_cg.tools.doctor.finding import NotReachedError

SECONDS = 300.0
"""Time limit of the other process; imports from a cold network disk take minutes."""
TORCH, DRIVER, TE = "torch", "driver", "transformer_engine"
SYMBOLS, FLAGS = "symbols", "flags"
CHANGES, COLLECTED = "changes", "collect_env"
Answers = dict[str, dict[str, Any]]
"""By stage: ``{"found": ...}``, or ``{"error": text}``."""
_TAIL = 600
_ROOT = Path(__file__).resolve().parents[3]


class StageError(Exception):
    """A stage failed in the other process; the text describes the failure."""

    def __init__(self, stage: str, text: str) -> None:
        self.stage = stage
        super().__init__(text)


class Interpreter:
    """Runs ``probe.py`` in the environment of a run, once, at the first query.

    Args:
        backend: the capture backend; stages that it does not need are not run.
        variables: the environment of the other process.
        version: returns the installed version of a distribution, or None.
        folders: where the other process looks for modules.
    """

    def __init__(
        self,
        backend: str,
        variables: Mapping[str, str],
        version: Callable[[str], str | None],
        folders: Sequence[Path] = (),
    ) -> None:
        self._backend, self._variables, self._version = backend, variables, version
        self._folders = folders
        self._answers: Answers | None = None

    def ask(self, stage: str) -> Any:
        """The findings of the stage.

        Raises StageError if it failed, and NotReachedError if it was not run.
        """
        if self._answers is None:
            stages = self._stages()
            self._answers = run_probe(stages, self._backend, self._variables) if stages else {}
        answer = self._answers.get(stage)
        if answer is None:
            raise NotReachedError(f"not looked at: {self._why_not(stage, self._answers)}")
        if "error" in answer:
            raise StageError(stage, answer["error"])
        return answer["found"]

    def _why_not(self, stage: str, answers: Answers) -> str:
        failed = [name for name, answer in answers.items() if "error" in answer]
        if failed:
            return f"looking at {failed[-1]} failed"
        for package in ("torch", "transformer-engine", "megatron-core"):
            if self._version(package) is None:
                return f"{package} is not installed"
        return f"{stage} has no part in the backend {self._backend}"

    def _stages(self) -> list[str]:
        """The stages in order; none without torch, which all of them import."""
        te = self._backend == TE and self._version("transformer-engine") is not None
        # A clone of Megatron-LM on the path is not an installed distribution.
        clones = ((folder / "megatron" / "core").is_dir() for folder in self._folders)
        megatron = self._version("megatron-core") is not None or any(clones)
        wanted = {
            TORCH: True,
            DRIVER: self._backend != TAPE,
            TE: te,
            **dict.fromkeys((SYMBOLS, FLAGS, CHANGES), megatron),
            # Last, because it starts many programs, and no other stage needs it.
            COLLECTED: True,
        }
        there = self._version("torch") is not None
        return [stage for stage, is_wanted in wanted.items() if there and is_wanted]


def run_probe(
    stages: Sequence[str], backend: str, variables: Mapping[str, str], seconds: float = SECONDS
) -> Answers:
    """The answers, as far as the other process got.

    If the process ended during a stage, by a signal or by the time limit, that stage has an error
    that says so; later stages are missing.
    """
    env = dict(variables)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), str(_ROOT)]))
    with tempfile.TemporaryDirectory(prefix="megatron-cg-doctor-") as folder:
        out, log = Path(folder, "answers"), Path(folder, "log")
        words = [sys.executable, "-m", "megatron_cg.tools.doctor.probe", str(out), backend, *stages]
        with log.open("wb") as file:
            streams: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
            try:
                done = subprocess.run(words, check=False, env=env, timeout=seconds, **streams)
                end = _end(done.returncode)
            except subprocess.TimeoutExpired:
                end = f"did not end within {seconds:g} seconds"
        answers = _read(out)
        missing = next((stage for stage in stages if stage not in answers), None)
        if missing is not None:
            text = log.read_text(errors="replace").strip()[-_TAIL:]
            said = f". It said last: {text}" if text else ""
            answers[missing] = {"error": f"the process that looks {end}{said}"}
    return answers


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    known = -code in set(signal.Signals)
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _read(path: Path) -> Answers:
    """One JSON object per line; a truncated last line is ignored."""
    answers: Answers = {}
    with suppress(FileNotFoundError, ValueError):
        for line in path.read_text(encoding="utf-8").splitlines():
            answers |= json.loads(line)
    return answers
