"""Runs as real processes: their end, their records and the verdict."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align import run
from megatron_cg.tools.align.run import OVERDUE, Run, check_start, named_error, run_and_compare
from megatron_cg.tools.record.compare import DIFFERENT, FAILED, IDENTICAL, Outcome
from tests.unit.ranks import ends
from tests.unit.tools.records import make_record

RECORD = """
import json, pathlib, sys
directory = pathlib.Path(sys.argv[1]); directory.mkdir(parents=True)
(directory / "rank0.jsonl").write_text(RECORD)
"""


class RunsOnceReady(Run):
    """A run whose timeout begins only once it has reported, by a file, that it is ready."""

    def start(self) -> subprocess.Popen[bytes]:
        process = super().start()
        while not (self.directory / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        return process


READY = "import pathlib, sys; pathlib.Path(sys.argv[1]).parent.joinpath('ready').touch()\n"


def make_runs(directory: Path, eager: str, graphs: str) -> list[Run]:
    made = []
    for name, code in (("eager", eager), ("graphs", graphs)):
        place = directory / name
        words = [sys.executable, "-c", code, str(place / "record")]
        kind = RunsOnceReady if READY in code else Run
        made.append(kind(name, words, dict(os.environ), place))
    return made


def recording(loss: float) -> str:
    """A script that leaves a record, whose first step has that loss."""
    record = make_record(steps=6)
    record["steps"][0]["losses"]["lm loss"] = loss
    return RECORD.replace("RECORD", repr(json.dumps(record)))


@pytest.mark.parametrize(("loss", "status"), [(1.0, IDENTICAL), (2.0, DIFFERENT)])
def test_two_runs_are_compared(loss: float, status: str, tmp_path: Path) -> None:
    said = "Step 6, trained with graphs and then eagerly, has other numbers: result"
    runs = make_runs(tmp_path, recording(1.0), f"print({said!r})\n{recording(loss)}")
    outcome = run_and_compare(runs, 600)
    assert outcome.comparison.status == status and outcome.log_tail == said
    assert outcome.eager is not None and outcome.graphed is not None
    # Their records are in the way of the next runs.
    with pytest.raises(MegatronCGError, match="holds an earlier run"):
        check_start(tmp_path)
    # And the eager one can be compared with again.
    again = make_runs(tmp_path / "again", "raise SystemExit(9)", recording(loss))[1:]
    assert run_and_compare(again, 600, runs[0].record).comparison.status == status


def failed(outcome: Outcome) -> str:
    assert outcome.comparison.status == FAILED
    return outcome.comparison.reason


@pytest.mark.parametrize(
    ("eager", "graphs", "reason", "tail"),
    [
        (
            recording(1.0),
            "raise ValueError('on purpose')",
            "the graphs run ended with exit code 1: ValueError: on purpose",
            "Traceback",
        ),
        (
            "raise SystemExit(7)",
            recording(1.0),
            "the eager run ended with exit code 7: no error was named",
            "",
        ),
        (
            recording(1.0),
            "print('nothing to see')",
            "the graphs run left no record: training did not begin",
            "nothing to see",
        ),
    ],
    ids=["error", "exit code", "no record"],
)
def test_a_run_that_failed_is_named_with_why_and_is_the_last(
    eager: str, graphs: str, reason: str, tail: str, tmp_path: Path
) -> None:
    runs = make_runs(tmp_path, eager, graphs)
    outcome = run_and_compare(runs, 600)
    assert failed(outcome).startswith(reason) and tail in outcome.log_tail
    assert runs[1].log.exists() is not reason.startswith("the eager run")


def test_a_killed_rank_is_named_by_its_signal(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, *{words!r}]))"
    runs = make_runs(tmp_path, recording(1.0), code)
    reason = failed(run_and_compare(runs, 600))
    assert reason == "the graphs run ended with exit code 1: rank 1 was ended by Signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("waits", "why"),
    [("worker.wait()", "did not end within --timeout 0.5 s"), ("", "left no record: training")],
)
def test_a_run_ends_with_its_workers_and_those_that_ignore_a_signal(
    waits: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_STOP_SECONDS", 0.5)
    worker = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pathlib.Path(sys.argv[1]).parent.joinpath('ready').touch(); time.sleep(600)"
    )
    code = (
        "import subprocess, sys, time, pathlib\n"
        f"words = [sys.executable, '-c', {worker!r}, sys.argv[1]]\n"
        "worker = subprocess.Popen(words, start_new_session=True)\n"
        "folder = pathlib.Path(sys.argv[1]).parent\n"
        "(folder / 'pid').write_text(str(worker.pid))\n"
        "while not (folder / 'ready').exists(): time.sleep(0.05)\n"
        f"{waits}\n"
    )
    runs = make_runs(tmp_path, code + "#" + READY, recording(1.0))
    assert failed(run_and_compare(runs, 0.5 if waits else 600)).startswith(f"the eager run {why}")
    assert ends(int((tmp_path / "eager" / "pid").read_text()))


@pytest.mark.parametrize("said", ["", "KeyError: 'weight'"])
def test_the_signal_that_stops_torchrun_is_not_taken_for_the_cause(
    said: str, tmp_path: Path
) -> None:
    """A rank that failed where the others go on waiting is; torchrun names the signal itself."""
    code = (
        "import signal, sys, time\n"
        "def stopped(number, frame):\n"
        "    print('SignalException: Process 7 got signal: 15', flush=True)\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, stopped)\n"
        f"print({said!r}, flush=True)\n"
        f"{READY}time.sleep(600)\n"
    )
    waiting = make_runs(tmp_path, recording(1.0), code)[1:]
    outcome = run_and_compare(waiting, 0.5)
    before = f"said {said!r} and " if said else ""
    assert failed(outcome) == f"the graphs run {before}{OVERDUE} 0.5 s"
    assert OVERDUE in outcome.log_tail


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("x\n[rank1]: torch.AcceleratorError: CUDA error\nTypeError: later", None),
        ("spawn.ProcessRaisedException: \n\nTraceback\nKeyError: 'a'", "KeyError: 'a'"),
        ("megatron_cg: error: CUDA graphs cannot be used, 1 reason:\n  1. [x] y", None),
        (
            "megatron_cg: graphs captured: 3, of 3 layers, in 1.5 s\n"
            "ValueError: x\nmegatron_cg.errors.ReplayMismatchError: layer 1",
            "megatron_cg.errors.ReplayMismatchError: layer 1",
        ),
        ("UserWarning: an Error may follow\nall is well", ""),
        ("", ""),
    ],
)
def test_the_cause_is_found_in_a_log(log: str, error: str | None) -> None:
    first = next((line for line in log.splitlines() if ":" in line and line != "x"), "")
    assert named_error(log) == (first.removeprefix("[rank1]: ") if error is None else error)
