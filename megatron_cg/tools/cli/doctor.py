"""Check this machine: what prevents CUDA graphs here, and what to type.

Prints what is wrong first, with the reason and what to type, then the facts: versions, driver,
libraries, symbols that this package relies on, environment variables. Nothing is changed. Exit code
0: graphs can run (with --backend tape: the comparison on the CPU can); 1: something prevents them.
"""

import argparse
import os
from collections.abc import Sequence

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=(TRANSFORMER_ENGINE, NATIVE, TAPE),
        default=TRANSFORMER_ENGINE,
        help="what captures: TE on GPUs (default), only torch on GPUs, or the tape, which needs "
        "neither",
    )


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from rich.console import Console

    from megatron_cg.tools.doctor.checks import can_run, examine, print_report
    from megatron_cg.tools.doctor.system import System, run_probe

    with Console(stderr=True).status("checking, which takes some seconds"):
        here = System(run_probe(args.backend, os.environ), args.backend, os.environ)
        findings = examine(here)
    print_report(Console(highlight=False), here, findings)
    return 0 if can_run(findings) else 1
