"""A command that is told to end leaves no run behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_cg.cli.signals import ENDING, ended_in_order

COMMAND = """
import os, sys
from pathlib import Path
from megatron_cg.align.processes import Run
from megatron_cg.cli import main

def run(args, extra):
    started = Run("a", [sys.executable, "-c", {worker!r}], dict(os.environ), Path({folder!r}))
    try:
        started.start(60.0)
        return started.wait()
    finally:
        started.stop()

import megatron_cg.cli.align
megatron_cg.cli.align.run = run
sys.exit(main.main(["align"]))
"""


def alive(pid: int) -> bool:
    """Whether a process is there, and not merely waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("ending", ENDING)
def test_what_it_runs_ends_with_it(tmp_path: Path, ending: signal.Signals) -> None:
    written = tmp_path / "pid"
    worker = (
        "import os, time; from pathlib import Path; "
        f"Path({str(written)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    body = COMMAND.format(worker=worker, folder=str(tmp_path))
    command = subprocess.Popen([sys.executable, "-c", body])
    try:
        while not (written.exists() and written.read_text()):
            assert command.poll() is None
            time.sleep(0.05)
        worker_pid = int(written.read_text())
        assert alive(worker_pid)
        command.send_signal(ending)
        assert command.wait(30) == 128 + ending
        assert not alive(worker_pid)
    finally:
        command.kill()
        command.wait()


def test_a_second_signal_is_the_systems_and_all_is_as_before_in_the_end() -> None:
    before = [signal.getsignal(ending) for ending in ENDING]
    with pytest.raises(SystemExit) as caught, ended_in_order():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert caught.value.code == 128 + signal.SIGTERM
    with ended_in_order():
        try:
            signal.raise_signal(signal.SIGHUP)
        except SystemExit:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [signal.getsignal(ending) for ending in ENDING] == before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
