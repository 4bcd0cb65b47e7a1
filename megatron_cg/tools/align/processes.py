"""Makes the two runs in separate processes, with logs, a time limit and a named error."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cg.errors import STEP_DIFFERS, MegatronCGError
from megatron_cg.tools.align.compare import FAILED, Comparison, Outcome, compare
from megatron_cg.tools.record.read_record import RecordError, read_run

OVERDUE = "did not end within --timeout"
"""How a run's log and the comparison describe a run that had to be stopped."""
_TAIL = 40
_STOP_SECONDS = 20.0
"""How long processes have to end by themselves before they are killed."""
_DIFFERED = re.compile(rf".* {STEP_DIFFERS}: .*")
_SUPERVISOR = str(Path(__file__).with_name("supervise.py"))
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
class Run:
    """One run: its command line and environment, and the directory for its log and record."""

    name: str
    words: Sequence[str]
    env: Mapping[str, str]
    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "record"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    def make(self, timeout: float) -> str:
        """Start it and wait for its end; returns why it failed, as a clause, or nothing.

        Leaves no process behind.
        """
        process = self.start()
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            # Read before stopping it: torchrun would report the signal as an error.
            named = named_error(self.text())
            overdue = (f"said {named!r} and " if named else "") + f"{OVERDUE} {timeout:g} s"
            _stop(process)
            with self.log.open("a") as log:
                log.write(f"\nTimeoutError: the run {overdue}\n")
            return overdue
        finally:
            _stop(process)
        return _end(code, self.text()) if code else ""

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in its own session: Ctrl-C reaches this process alone, which stops it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        print(f"{self.name} run started", file=sys.stderr, flush=True)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", _SUPERVISOR, str(_STOP_SECONDS), *self.words],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let ``supervise.py`` end everything; it goes on if this wait is interrupted."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def check_start(directory: Path) -> None:
    for record in directory.glob("*/record"):
        raise LaunchError(f"{record} holds an earlier run: give another --work-dir.")


def run_and_compare(
    runs: Sequence[Run], timeout: float, eager_record: Path | None = None
) -> Outcome:
    """Make the runs in turn, each within ``timeout`` seconds, and compare their records.

    The last run is the one with graphs. With the record of an eager run it is the only one.
    """
    for run in runs:
        failure = run.make(timeout)
        if not failure and not run.record.exists():
            why = "training did not begin, or the log says why the record was not written"
            failure = f"left no record: {why}"
        if failure:
            reason = f"the {run.name} run {failure}"
            return Outcome(Comparison(FAILED, reason), log_tail(run.text()))
    try:
        eager = read_run(eager_record or runs[0].record)
        graphed = read_run(runs[-1].record)
    except RecordError as error:
        return Outcome(Comparison(FAILED, str(error)), log_tail(runs[-1].text()))
    differed = "\n".join(_DIFFERED.findall(runs[-1].text()))
    return Outcome(compare(eager, graphed), differed, eager=eager, graphed=graphed)


def _end(code: int, log: str) -> str:
    named, killed = named_error(log), _KILLED.search(log)
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
    lines = log.splitlines()
    end = next((n for n, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
    return "\n".join(lines[max(0, end - _TAIL) : end])
