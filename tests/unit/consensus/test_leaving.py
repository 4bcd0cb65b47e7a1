"""The end of a process that is out of step with the other ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, logging, threading
from megatron_cg.consensus.process_exit import exit_without_waiting
# What the end of a process out of step meets: something that waits for other ranks for ever.
atexit.register(threading.Event().wait)
exit_without_waiting()
exit_without_waiting()
print("written")
raise RuntimeError("a hook raised")
"""


@pytest.mark.parametrize(
    "broken", ["os.close(1); os.close(2)", "sys.stdout = None", "sys.stdout.close()"]
)
def test_output_that_is_broken_keeps_nobody(broken: str) -> None:
    script = SCRIPT.replace('print("written")', f"import os, sys; print('x'); {broken}")
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=600, check=False
    )
    assert ended.returncode == 1


def test_the_error_is_out_and_nothing_at_the_end_waits() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "written\n"
    assert "RuntimeError: a hook raised" in ended.stderr
