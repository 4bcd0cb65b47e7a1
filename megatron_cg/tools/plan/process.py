"""Makes plans in a separate process.

There Megatron is built on the fakes of Transformer Engine, whatever is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.plan.request import Request

PATIENCE = 3.0
"""Seconds without output before a plan shows that it is running."""
WORKING = "planning: Megatron builds the model, and its layers run once without a GPU"
Plan = dict[str, Any]
"""A plan as JSON."""


class PlanError(MegatronCGError):
    """The process that makes plans ended without a plan."""


def make_plans(requests: Sequence[Request], *, timeout: float = 600.0) -> list[Plan]:
    """A plan for each request, all made by one process.

    Raises PlanError with the end of the process's output when it failed or took more than
    ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-cg-plan-") as folder:
        asked, answered = Path(folder, "requests.json"), Path(folder, "plans.json")
        asked.write_text(json.dumps([vars(request) for request in requests]), encoding="utf-8")
        # An existing GPU must not be used: the plan is the same without it.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        root = str(Path(__file__).resolve().parents[3])
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, os.environ.get("PYTHONPATH", "")])
        )
        command = [sys.executable, "-m", "megatron_cg.tools.plan.worker", str(asked), str(answered)]
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            try:
                said = _wait(process, timeout)
            except subprocess.TimeoutExpired as error:
                raise PlanError(f"no plan was made within {timeout:g} seconds.") from error
            finally:
                process.kill()
        if process.returncode or not answered.exists():
            end = "\n".join(said.strip().splitlines()[-25:])
            raise PlanError(f"making the plan failed (exit code {process.returncode}):\n{end}")
        plans: list[Plan] = json.loads(answered.read_text(encoding="utf-8"))
        return plans


def _wait(process: subprocess.Popen[str], timeout: float) -> str:
    """The output of the process until its end; a long run is shown as running."""
    patience = min(PATIENCE, timeout)
    try:
        return process.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired:
        if patience == timeout:
            raise
    with _working():
        return process.communicate(timeout=timeout - patience)[0]


@contextmanager
def _working() -> Iterator[None]:
    """Show a clock on a terminal, otherwise a line; both on standard error."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{WORKING} ...", file=sys.stderr, flush=True)
        yield
        return
    columns = SpinnerColumn(), TextColumn(WORKING), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task("")
        yield
