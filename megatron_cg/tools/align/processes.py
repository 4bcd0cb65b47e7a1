"""Makes the two runs in separate processes, with logs, a time limit and a named error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_cg.errors import MegatronCGError
from megatron_cg.telemetry.read_record import RecordError, read_run
from megatron_cg.tools.align.compare import (
    FAILED,
    Comparison,
    Outcome,
    compare,
)

OVERDUE = "did not end within --timeout"
"""How a run's log and the comparison describe a run that had to be stopped."""
NO_DROPLESS = (
    "--scopes moe captures dropless experts, and Megatron's own grouped GEMM reads their row "
    "counts on the host: add --cg-grouped-gemm torch, or give --scopes attn moe_router."
)
_TAIL = 40
_STOP_SECONDS = 20.0
_NAMED = re.compile(
    r"^(?:\[rank\d+\]:\s*)?"
    r"((?:(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b|megatron_cg: error: ).*)$"
)
_OURS = ("megatron_cg: error: ", "megatron_cg.")
_CLASS_ALONE = re.compile(r"[\w.]+:")
# torchrun's report of the process that failed first, if a signal ended it.
_KILLED = re.compile(
    r"Root Cause .*?^\s*rank\s*: (\d+) .*?^\s*traceback : (Signal \d+ \(\w+\))", re.M | re.S
)
# torchrun's line on which process failed. It follows the cause but does not name it.
_TORCHRUN = re.compile(r"^E\d{4} .*\bfailed \(exitcode")


class LaunchError(MegatronCGError):
    """A run cannot be started on this machine, or not with these options."""


@dataclass(frozen=True)
class Options:
    """Options of the two runs; ``directory`` is for their logs and records."""

    directory: Path
    timeout: float
    """Time limit of one run."""
    eager_record: Path | None = None
    """The record of an eager run that was made before; then only the graph run is made."""
    mutation: str | None = None
    """What a script of tests does to the graph run alone, by ``MEGATRON_CG_MUTATE``."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the runs; ``graphs`` is the last."""
        return ("graphs",) if self.eager_record else ("eager", "graphs")


@dataclass
class Run:
    """One run: its command line and environment, and the directory for its log and record."""

    name: str
    words: Sequence[str]
    env: dict[str, str]
    directory: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    overdue: str = field(default="", init=False)
    """Why it had to be stopped, as a clause; empty if it ended by itself."""
    _timeout: float = field(default=0.0, init=False)
    _deadline: float = field(default=0.0, init=False)

    @property
    def record(self) -> Path:
        """The directory of the ranks' records."""
        return self.directory / "record"

    @property
    def log(self) -> Path:
        """The file with the run's output, both streams."""
        return self.directory / "log.txt"

    def start(self, timeout: float) -> None:
        """Start it in its own session, so that its workers can be stopped with it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.words,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        print(f"{self.name} run started", file=sys.stderr, flush=True)

    def wait(self) -> int:
        """Its exit code, or -1 if it reached the time limit and was stopped."""
        assert self.process is not None
        try:
            return self.process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Read before stopping it: torchrun would report the signal as an error.
            named = named_error(self.text())
            late = f"{OVERDUE} {self._timeout:g} s"
            self.overdue = f"said {named!r} and {late}" if named else late
            self.stop()
            with self.log.open("a") as log:
                log.write(f"\nTimeoutError: the run {self.overdue}\n")
            return -1

    def stop(self) -> None:
        """Stop the run and its workers if it still runs."""
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")


def check_start(options: Options) -> None:
    """Raise LaunchError if the folder has records of an earlier run."""
    for name in options.names:
        record = options.directory / name / "record"
        if record.exists():
            raise LaunchError(f"{record} holds an earlier run: give another --work-dir.")


def run_and_compare(runs: Sequence[Run], options: Options) -> Outcome:
    """Make the runs in turn and compare their records. Leaves no process behind."""
    failed = _run_all(runs, options)
    if failed is not None:
        reason = f"the {failed.name} run {failed.overdue or _end(failed)}"
        return Outcome(Comparison(FAILED, reason), log_tail(failed.text()))
    for run in runs:
        if not run.record.exists():
            why = "training did not begin, or the log says why the record was not written"
            reason = f"the {run.name} run left no record: {why}"
            return Outcome(Comparison(FAILED, reason), log_tail(run.text()))
    try:
        eager = read_run(options.eager_record or runs[0].record)
        graphed = read_run(runs[-1].record)
    except RecordError as error:
        return Outcome(Comparison(FAILED, str(error)), log_tail(runs[-1].text()))
    return Outcome(compare(eager, graphed), eager=eager, graphed=graphed)


def _run_all(runs: Sequence[Run], options: Options) -> Run | None:
    """Run all; returns the first that failed, or None."""
    for run in runs:
        try:
            run.start(options.timeout)
            if run.wait() != 0:
                return run
        finally:
            run.stop()
    return None


def _end(run: Run) -> str:
    code = run.process.returncode if run.process is not None else None
    text = run.text()
    named, killed = named_error(text), _KILLED.search(text)
    # A process with a failed GPU aborts while it exits, after it has reported the cause.
    if killed is not None and not named.startswith(_OURS):
        return f"ended with exit code {code}: rank {killed[1]} was ended by {killed[2]}"
    return f"ended with exit code {code}: {named or 'no error was named'}"


def named_error(log: str) -> str:
    """The line of ``log`` that names the error, as Python prints it; empty if there is none.

    An error of this package says what to do, so it takes precedence over the exception that it was
    raised from. Of several errors the first is returned: the other ranks and torchrun itself fail
    as a consequence.
    """
    matches = (_NAMED.match(line.strip()) for line in log.splitlines())
    # torch.multiprocessing prints its own exception first, and the cause below it.
    lines = (match.group(1) for match in matches if match)
    named = [line for line in lines if not _CLASS_ALONE.fullmatch(line)]
    ours = [line for line in named if line.startswith(_OURS)]
    return next(iter(ours + named), "")


def log_tail(log: str) -> str:
    """The last lines of a log, before the report with which torchrun ends."""
    lines = log.splitlines()
    end = next((n for n, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
    return "\n".join(lines[max(0, end - _TAIL) : end])
