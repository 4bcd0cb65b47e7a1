"""Compile a run's layers, then become the run: ``python -m ...compiled_first COMMAND``.

COMMAND is the run's whole command line, with ``--cg-precompile-dir``. The artifact is for the GPUs
of this machine, and is made by a process that sees none, as on a machine without any.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch


def precompile(command: Sequence[str]) -> list[str]:
    """The command that makes the artifact of a run."""
    words = [sys.executable, "-m", "megatron_cg.tools.cli.main", "precompile"]
    if torch.cuda.is_available():
        words += ["--capability", "{}.{}".format(*torch.cuda.get_device_capability())]
    return [*words, "--", *command]


def main(command: Sequence[str]) -> None:
    """Raises SystemExit with the exit code of ``precompile`` if that fails."""
    without_gpus = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = subprocess.run(precompile(command), env=without_gpus, check=False).returncode
    if code:
        raise SystemExit(code)
    os.execv(command[0], list(command))


if __name__ == "__main__":
    main(sys.argv[1:])
