"""Queries another interpreter, so that a crash does not affect this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import TAPE
from megatron_cg.tools.doctor.finding import NotReachedError

SECONDS = 300.0
"""Time limit of the other process; imports from a cold network disk take minutes."""
LOADER, TORCH, DRIVER, TE = "loader", "torch", "driver", "transformer_engine"
SYMBOLS, FLAGS = "symbols", "flags"
CHANGES, COLLECTED = "changes", "collect_env"
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
    """

    def __init__(
        self, backend: str, variables: Mapping[str, str], version: Callable[[str], str | None]
    ) -> None:
        self._backend, self._variables, self._version = backend, dict(variables), version
        self._answers: dict[str, dict[str, Any]] | None = None

    def ask(self, stage: str) -> Any:
        """The findings of the stage.

        Raises StageError if it failed, and NotReachedError if it was not run.
        """
        if self._answers is None:
            self._answers = self._run_all()
        answer = self._answers.get(stage)
        if answer is None:
            raise NotReachedError(f"not looked at: {self._why_not(stage)}")
        if "error" in answer:
            raise StageError(stage, answer["error"])
        return answer["found"]

    def _why_not(self, stage: str) -> str:
        failed = [name for name, answer in (self._answers or {}).items() if "error" in answer]
        if failed:
            return f"looking at {failed[-1]} failed"
        for package in ("torch", "transformer-engine", "megatron-core"):
            if self._version(package) is None:
                return f"{package} is not installed"
        return f"{stage} has no part in the backend {self._backend}"

    def _run_all(self) -> dict[str, dict[str, Any]]:
        # In a separate process: libraries that it loads by bare names would replace torch's own.
        answers = run_probe([LOADER], self._backend, self._variables)
        if self._version("torch") is None:
            return answers
        stages = [TORCH]
        if self._backend != TAPE:
            stages.append(DRIVER)
        if self._backend == TE and self._version("transformer-engine") is not None:
            stages.append(TE)
        if self._version("megatron-core") is not None or self._has_megatron():
            stages += [SYMBOLS, FLAGS, CHANGES]
        # Last, because it starts many programs, and no other stage needs it.
        stages.append(COLLECTED)
        return answers | run_probe(stages, self._backend, self._variables)

    def _has_megatron(self) -> bool:
        places = [os.getcwd(), *self._variables.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        return any((Path(place) / "megatron" / "core").is_dir() for place in places if place)


def run_probe(
    stages: Sequence[str], backend: str, variables: Mapping[str, str], seconds: float = SECONDS
) -> dict[str, dict[str, Any]]:
    """``{stage: {"found": ...} or {"error": text}}``, as far as the other process got.

    If the process ended during a stage, by a signal or by the time limit, that stage has an error
    that says so; later stages are missing.
    """
    env = dict(variables)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH", ""), str(_ROOT)]))
    with tempfile.TemporaryDirectory(prefix="megatron-cg-doctor-") as folder:
        out, log = Path(folder) / "answers", Path(folder) / "log"
        words = [sys.executable, "-m", "megatron_cg.tools.doctor.probe", str(out), backend, *stages]
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    words,
                    check=False,
                    env=env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                )
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
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """One JSON object per line; a truncated last line is ignored."""
    answers: dict[str, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                answers |= json.loads(line)
            except ValueError:
                break
    return answers
