"""What tests of plans share: command lines, and how a plan is read."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from megatron_cg.tools.cli import plan as command
from megatron_cg.tools.plan.process import Plan
from megatron_cg.tools.plan.request import Request, read_request
from megatron_cg.tools.plan.tables import print_plan


def on_preset(flags: str, **more: Any) -> Request:
    return read_request("llama-tiny", flags.split(), **more)


def shown(plan: Plan) -> str:
    console = Console(width=command.WIDTH, record=True, file=io.StringIO())
    print_plan(console, plan)
    return console.export_text()


def rules(plan: Plan) -> set[str]:
    return {item["rule"] for item in plan["violations"]}
