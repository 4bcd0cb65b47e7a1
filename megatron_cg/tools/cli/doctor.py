"""Check this machine: what prevents CUDA graphs here, and what to type.

Checks versions, symbols that this package relies on, environment variables, libraries, driver and
GPUs. Each finding has a reason and a remedy. Nothing is changed and no GPU memory is taken. Exit
code 0: graphs can run (with --backend tape: the comparison on the CPU can); 1: something prevents
them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.errors import MegatronCGError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument(
        "--backend",
        choices=(TRANSFORMER_ENGINE, NATIVE, TAPE),
        default=TRANSFORMER_ENGINE,
        help="what captures: TE on GPUs (default), only torch on GPUs, or the tape, which needs "
        "neither",
    )


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Run the checks and report; returns the exit code."""
    if extra:
        raise MegatronCGError(f"the doctor takes no {' '.join(extra)}: leave out what follows --")
    from rich.console import Console

    from megatron_cg.tools.doctor.ask import CHANGES, COLLECTED
    from megatron_cg.tools.doctor.checks import can_run, examine
    from megatron_cg.tools.doctor.findings_shown import as_json, print_report
    from megatron_cg.tools.doctor.system import this_system, told

    with Console(stderr=True).status("checking, which takes some seconds"):
        here = this_system(args.backend)
        findings = examine(here)
        more = {"changes": told(here, CHANGES), "system": told(here, COLLECTED)}
    if args.json:
        print(json.dumps(as_json(args.backend, findings) | more, indent=1))
    else:
        console = Console(highlight=False)
        print_report(console, args.backend, findings, more["changes"] or ())
    return 0 if can_run(findings) else 1
