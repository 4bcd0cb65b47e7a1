"""Code in a Python process of its own, whose imports are its own."""

import os
import subprocess
import sys


def python(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def last_line_of(code: str) -> str:
    """Kernels run on a CPU by Triton's interpreter, which is chosen before an import."""
    ended = python(code, TRITON_INTERPRET="1")
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1]
