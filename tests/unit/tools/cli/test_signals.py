"""A command that is told to end leaves no run behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_cg.tools.cli.signals import ENDING, ended_in_order

COMMAND = """
import os, signal, sys
# As a shell starts it; whoever runs these tests may ignore one, as nohup does.
for ending in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(ending, signal.SIG_DFL)
from pathlib import Path
from megatron_cg.tools.align.processes import Run
from megatron_cg.tools.cli import main

def run(args, extra):
    started = Run("a", [sys.executable, "-c", {worker!r}], dict(os.environ), Path({folder!r}))
    try:
        started.start(60.0)
        return started.wait()
    finally:
        started.stop()

import megatron_cg.tools.cli.align
megatron_cg.tools.cli.align.run = run
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
        f"Path({str(written)!r}).write_text(str(os.getpid())); time.sleep(600)"
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
        assert command.wait(300) == 128 + ending
        assert not alive(worker_pid)
    finally:
        command.kill()
        command.wait()


@pytest.fixture
def usual() -> Iterator[None]:
    """What a shell would have set, whoever runs these tests."""
    before = [signal.signal(ending, signal.SIG_DFL) for ending in ENDING]
    yield
    for ending, handler in zip(ENDING, before, strict=True):
        signal.signal(ending, handler)


@pytest.mark.usefixtures("usual")
def test_a_second_signal_is_the_systems_and_all_is_as_before_in_the_end() -> None:
    with pytest.raises(SystemExit) as caught, ended_in_order():
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            assert [signal.getsignal(ending) for ending in ENDING] == [signal.SIG_DFL] * 2
    assert caught.value.code == 128 + signal.SIGHUP
    with ended_in_order():
        assert signal.SIG_DFL not in map(signal.getsignal, ENDING)
    assert [signal.getsignal(ending) for ending in ENDING] == [signal.SIG_DFL] * 2


@pytest.mark.usefixtures("usual")
def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_in_order():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
