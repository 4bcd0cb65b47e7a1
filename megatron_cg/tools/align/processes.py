"""Makes the two runs in separate processes, with logs, a time limit and a named error."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align.compare import (
    FAILED,
    Comparison,
    RecordError,
    compare,
    missing_ranks,
    read_run,
)
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.upstream.symbols import installed_version

OVERDUE = "did not end within --timeout"
"""How a run's log and the comparison describe a run that had to be stopped."""
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
    parallel: bool = False
    eager_record: Path | None = None
    mutation: str | None = None

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
    _log: IO[bytes] | None = field(default=None, init=False)
    _temporary: str = field(default="", init=False)

    @property
    def record(self) -> Path:
        """The directory of the ranks' records."""
        return self.directory / "record"

    @property
    def log(self) -> Path:
        """The file with the run's output, both streams."""
        return self.directory / "log.txt"

    def start(self, timeout: float) -> None:
        """Start it in its own session, so that its workers can be stopped with it.

        It gets its own folder for temporary files, which is deleted afterwards, because a killed
        process does not clean up. The folder's name is short, because the length of socket paths in
        it is limited.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._log = self.log.open("wb")
        self._temporary = tempfile.mkdtemp(prefix="megatron-cg-")
        self.process = subprocess.Popen(
            self.words,
            env={**_compiled(), **self.env, "TMPDIR": self._temporary},
            stdout=self._log,
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
        """Stop the run and its workers if it still runs; close its log, delete temporary files."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self._log is not None:
            self._log.close()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")


def _compiled() -> dict[str, str]:
    """The variable with the location of torch's compiled code, independent of TMPDIR.

    The default of torch 2.11, ``torch/_inductor/runtime/cache_dir_utils.py``.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")}


def check_start(options: Options, nproc: int) -> None:
    """Refuse runs that could not be compared at the end, before anything is created or started.

    Raises LaunchError when the folder has records of an earlier run, or when the eager record has
    another number of ranks or other versions. Raises RecordError when it cannot be read.
    """
    for name in options.names:
        _check_free(options.directory / name / "record")
    if options.eager_record is None:
        return
    run = read_run(options.eager_record)
    found = run[min(run)]
    wrong = missing_ranks(run)
    if found["captures"]:
        wrong = "graphs, so it is not of an eager run"
    elif found["world_size"] != nproc:
        wrong = f"{found['world_size']} ranks, and this run is to have {nproc}"
    for package, version in found["versions"].items():
        if package != "megatron-cg" and version != installed_version(package):
            here = installed_version(package) or "not installed"
            wrong = wrong or f"{package} {version or 'none'}, which here is {here}"
    if wrong:
        raise LaunchError(
            f"--eager-record {options.eager_record} has {wrong}: the runs could not be compared. "
            "Leave it out to train both."
        )


def _check_free(record: Path) -> None:
    if record.exists():
        raise LaunchError(f"{record} holds an earlier run: give another --work-dir.")


def run_and_compare(runs: Sequence[Run], options: Options) -> Outcome:
    """Make the runs, together or in turn, and compare their records. Leaves no process behind.

    Before it starts anything, it raises LaunchError when records of an earlier run exist, and
    RecordError when those of ``options.eager_record`` cannot be read.
    """
    for run in runs:
        _check_free(run.record)
    earlier = read_run(options.eager_record) if options.eager_record else None
    commands = {run.name: run.words for run in runs}
    failed = _run_all(runs, options)
    if failed is not None:
        reason = f"the {failed.name} run {failed.overdue or _end(failed)}"
        return Outcome(Comparison(FAILED, reason), commands, log_tail(failed.text()))
    for run in runs:
        if not run.record.exists():
            why = "training did not begin, or the log says why the record was not written"
            reason = f"the {run.name} run left no record: {why}"
            return Outcome(Comparison(FAILED, reason), commands, log_tail(run.text()))
    try:
        eager = earlier or read_run(runs[0].record)
        graphed = read_run(runs[-1].record)
    except RecordError as error:
        return Outcome(Comparison(FAILED, str(error)), commands, log_tail(runs[-1].text()))
    return Outcome(compare(eager, graphed), commands, eager=eager, graphed=graphed)


def _run_all(runs: Sequence[Run], options: Options) -> Run | None:
    """Run all; returns the first that failed, or None."""
    groups = [list(runs)] if options.parallel else [[run] for run in runs]
    try:
        for group in groups:
            for run in group:
                run.start(options.timeout)
            for run in group:
                if run.wait() != 0:
                    return run
    finally:
        for run in runs:
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
    lines = (found.group(1) for found in matches if found)
    named = [line for line in lines if not _CLASS_ALONE.fullmatch(line)]
    ours = [line for line in named if line.startswith(_OURS)]
    return next(iter(ours + named), "")


def log_tail(log: str) -> str:
    """The last lines of a log, before the report with which torchrun ends."""
    lines = log.splitlines()
    end = next((n for n, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
    return "\n".join(lines[max(0, end - _TAIL) : end])
