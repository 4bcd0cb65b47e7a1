"""Runs as real processes: their end, their records and the verdict."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.compare import DIFFERENT, FAILED, IDENTICAL, RecordError
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.processes import (
    OVERDUE,
    LaunchError,
    Options,
    Run,
    named_error,
    run_and_compare,
)
from tests.unit.tools.align.records import make_rank

RECORD = """
import json, pathlib, sys
directory = pathlib.Path(sys.argv[1]); directory.mkdir(parents=True)
(directory / "rank0.jsonl").write_text(RECORD)
"""


class RunsOnceReady(Run):
    """A run whose timeout begins only once it has reported, by a file, that it is ready."""

    def start(self, timeout: float) -> None:
        super().start(timeout)
        assert self.process is not None
        while not (self.directory / "ready").exists():
            assert self.process.poll() is None
            time.sleep(0.05)


READY = "import pathlib, sys; pathlib.Path(sys.argv[1]).parent.joinpath('ready').touch()\n"


def make_runs(directory: Path, eager: str, graphs: str) -> list[Run]:
    made = []
    for name, code in (("eager", eager), ("graphs", graphs)):
        place = directory / name
        words = [sys.executable, "-c", code, str(place / "record")]
        kind = RunsOnceReady if READY in code else Run
        made.append(kind(name, words, dict(os.environ), place))
    return made


def recording(loss: float, **fields: Any) -> str:
    """A script that leaves a record of one step with that loss."""
    step = {"losses": {"lm loss": loss}, "grad_norm": None, "skipped": False}
    record = make_rank({"captured": 1, "replayed": 1}) | {"steps": [step | {"milliseconds": 1.0}]}
    return RECORD.replace("RECORD", repr(json.dumps(record | fields)))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("loss", "status"), [(1.0, IDENTICAL), (2.0, DIFFERENT)])
def test_two_runs_are_compared(parallel: bool, loss: float, status: str, tmp_path: Path) -> None:
    runs = make_runs(tmp_path, recording(1.0), recording(loss))
    outcome = run_and_compare(runs, Options(tmp_path, timeout=600, parallel=parallel))
    assert outcome.comparison.status == status
    assert outcome.eager is not None and outcome.graphed is not None
    assert set(outcome.commands) == {"eager", "graphs"}


def test_an_earlier_eager_record_is_used_again(tmp_path: Path) -> None:
    first = make_runs(tmp_path / "first", recording(1.0), recording(1.0))
    run_and_compare(first, Options(tmp_path, timeout=600))
    again = make_runs(tmp_path / "again", "raise SystemExit(9)", recording(1.0))[1:]
    options = Options(tmp_path, timeout=600, eager_record=first[0].record)
    assert options.names == ("graphs",)
    assert run_and_compare(again, options).comparison.status == IDENTICAL


def test_nothing_is_run_for_an_earlier_record_that_is_not_there(tmp_path: Path) -> None:
    (run,) = make_runs(tmp_path, "", recording(1.0))[1:]
    with pytest.raises(RecordError, match=r"there is no folder .*nowhere"):
        run_and_compare([run], Options(tmp_path, 600, eager_record=tmp_path / "nowhere"))
    assert run.process is None


def failed(outcome: Outcome) -> str:
    assert outcome.comparison.status == FAILED
    return outcome.comparison.reason


def test_a_failed_run_is_named_with_its_error(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, recording(1.0), "raise ValueError('on purpose')")
    outcome = run_and_compare(runs, Options(tmp_path, timeout=600))
    assert failed(outcome) == "the graphs run ended with exit code 1: ValueError: on purpose"
    assert "Traceback" in outcome.log_tail


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
    reason = failed(run_and_compare(runs, Options(tmp_path, timeout=600)))
    assert reason == "the graphs run ended with exit code 1: rank 1 was ended by Signal 9 (SIGKILL)"


def test_the_second_is_not_started_after_the_first_failed(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, "raise SystemExit(7)", recording(1.0))
    reason = failed(run_and_compare(runs, Options(tmp_path, timeout=600)))
    assert reason == "the eager run ended with exit code 7: no error was named"
    assert runs[1].process is None


def test_a_run_without_a_record_has_failed(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, recording(1.0), "print('nothing to see')")
    outcome = run_and_compare(runs, Options(tmp_path, timeout=600))
    assert failed(outcome).startswith("the graphs run left no record: training did not")
    assert outcome.log_tail == "nothing to see"


def test_a_run_that_takes_too_long_is_ended_with_its_workers(tmp_path: Path) -> None:
    sleeper = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys, pathlib\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {sleeper!r}])\n"
        "pathlib.Path(sys.argv[1]).parent.joinpath('pid').write_text(str(worker.pid))\n"
        f"{READY}worker.wait()\n"
    )
    runs = make_runs(tmp_path, code, recording(1.0))
    reason = failed(run_and_compare(runs, Options(tmp_path, timeout=0.5)))
    assert reason == "the eager run did not end within --timeout 0.5 s"
    pid = (tmp_path / "eager" / "pid").read_text()
    deadline = time.monotonic() + 300
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


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
    runs = make_runs(tmp_path, recording(1.0), code)
    outcome = run_and_compare(runs, Options(tmp_path, timeout=0.5))
    before = f"said {said!r} and " if said else ""
    assert failed(outcome) == f"the graphs run {before}{OVERDUE} 0.5 s"
    assert OVERDUE in outcome.log_tail


def test_a_run_that_is_killed_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it lose what torch compiled in earlier runs, which is kept there."""
    code = (
        "import os, pathlib, signal, sys, tempfile\n"
        "place = pathlib.Path(tempfile.mkdtemp())\n"
        "(place / 'left').touch()\n"
        "seen = pathlib.Path(sys.argv[1]).parent / 'seen'\n"
        "seen.write_text(f\"{place} {os.environ['TORCHINDUCTOR_CACHE_DIR']}\")\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("getpass.getuser", lambda: "a/user")
    runs = make_runs(tmp_path, code, recording(1.0))
    failed(run_and_compare(runs, Options(tmp_path, timeout=60)))
    place, compiled = (tmp_path / "eager" / "seen").read_text().split()
    assert place.startswith(str(temporary)) and not list(temporary.iterdir())
    assert compiled == f"{temporary}/torchinductor_a_user"


def is_running(pid: str) -> bool:
    """Whether it exists and is more than a zombie (proc(5): the state follows the name)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_an_earlier_record_is_not_overwritten(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, recording(1.0), recording(1.0))
    runs[1].record.mkdir(parents=True)
    with pytest.raises(LaunchError, match="holds an earlier run"):
        run_and_compare(runs, Options(tmp_path, timeout=600))
    assert runs[0].process is None


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("x\n[rank1]: torch.AcceleratorError: CUDA error\nTypeError: later", None),
        ("megatron_cg: error: CUDA graphs cannot be used as configured", None),
        ("spawn.ProcessRaisedException: \n\nTraceback\nKeyError: 'a'", "KeyError: 'a'"),
        ("megatron_cg: error: CUDA graphs cannot be used, 1 reason:\n  1. [x] y", None),
        (
            "megatron_cg: 3 graphs of 3 layers captured in 1.5 s\n"
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


def test_an_error_of_this_package_comes_before_its_cause() -> None:
    log = "ValueError: inside TE\n\nmegatron_cg.errors.CaptureError: capture failed with ValueError"
    assert named_error(log) == "megatron_cg.errors.CaptureError: capture failed with ValueError"
