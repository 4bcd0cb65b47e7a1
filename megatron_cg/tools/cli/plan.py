"""Without a GPU: the launch line that trains with graphs, what it captures, and whether it fits.

Give after a bare -- the whole command that starts the run now. Exit code 0: the printed command
starts and fits; 1: it is refused or does not fit; 2: the command cannot be read.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron_cg.tools.cli import positive

_USABLE = 0.99
"""The part of a card's nominal memory that a process can have: 79.2 GiB of 80."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=positive, help="GPUs of the whole run (default: what the launcher says)")
    add("--gpu-memory", type=positive, default=80, help="GB of one GPU (default: 80)")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_cg.tools.launch_line import read_line

    line = read_line(extra)
    # Imports torch and Megatron.
    from megatron_cg.tools.plan.edit import edit
    from megatron_cg.tools.plan.report import text_of

    plan = edit(line, int(args.gpu_memory * _USABLE * 2**30), args.gpus)
    sys.stdout.write(text_of(plan))
    return 0 if plan.accepted else 1
