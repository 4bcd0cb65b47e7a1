"""Python in a process of its own, whose imports are its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(
    *words: object, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``python WORDS`` prints in ``folder``, and how it ends."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def python(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("-c", code, *words, folder=None, **environment)


def last_line_of(code: str) -> str:
    """Kernels run on a CPU by Triton's interpreter, which is chosen before an import."""
    ended = python(code, TRITON_INTERPRET="1")
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1]
