"""Kernels on a CPU: Triton's interpreter is chosen before an import, so by a process of its own."""

import os
import subprocess
import sys


def last_line_of(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1]
