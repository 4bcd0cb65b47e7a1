"""Show, without a GPU, what a run would capture, what that costs, and every rule that it breaks.

Give a preset, or a script with its flags after a bare --, or after -- a whole command line. In the
part before the script only variables and the number of GPUs are read. Exit code 0: graphs can run;
1: a rule is broken; 2: the flags cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from megatron_cg.tools.align.presets import preset_names
from megatron_cg.tools.cli.options import add_scopes, positive

READY, BROKEN, UNREADABLE = 0, 1, 2
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    names = ", ".join(preset_names())
    add(
        "target",
        nargs="?",
        metavar="SCRIPT_OR_PRESET",
        help=f"a script (its name ends with .py), or a preset: {names}",
    )
    add_scopes(parser)
    add(
        "--nproc",
        type=positive,
        help="GPUs of the whole run (default: the preset's, the launcher's, or the fewest that the "
        "parallel sizes can have)",
    )
    add("--json", action="store_true", help="print the plan as JSON instead of tables")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Make the plan, print it, return the exit code."""
    from megatron_cg.tools.plan.process import make_plans
    from megatron_cg.tools.plan.request import read_request

    request = read_request(
        args.target,
        extra,
        scopes=args.scopes,
        cg_layers=args.cg_layers,
        cg_grouped_gemm=args.cg_grouped_gemm,
        nproc=args.nproc,
    )
    (plan,) = make_plans([request])
    if args.json:
        print(json.dumps(plan, indent=1))
    else:
        from rich.console import Console

        from megatron_cg.tools.plan.tables import print_plan

        console = Console(width=None if sys.stdout.isatty() else WIDTH, emoji=False)
        print_plan(console, plan)
    return exit_code(plan)


def exit_code(plan: dict[str, Any]) -> int:
    """0 if graphs can run, 1 if a rule is broken, 2 if the flags cannot be read."""
    if plan["usage"] is not None:
        return UNREADABLE
    return BROKEN if plan["violations"] or plan["megatron"] is not None else READY
