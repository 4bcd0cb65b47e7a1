"""One measured run on the CPU: ``python -m benchmarks.tape_run PLAN DIRECTORY``, PLAN in JSON.

PLAN is that of ``megatron_cg.tools.align.tape_worker``, which does the work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

# It keeps Transformer Engine from being imported with Megatron, so Megatron comes later.
from megatron_cg.tools.align import tape_worker
from megatron_cg.upstream.patch import put_over


def main(text: str, directory: str) -> None:
    """Train as the plan says, each process under a probe of its own."""
    from megatron_cg.tools.cpu import launch

    undo = put_over(launch, "run_plans", _run_measured)
    try:
        tape_worker.main(text, directory)
    finally:
        undo()


def _run_measured(jobs: Sequence[tuple[Any, Path]], processes: int) -> None:
    from megatron_cg.tools.cpu.launch import run_processes

    run_processes(partial(_train, tuple(jobs)), processes)


def _train(jobs: Sequence[tuple[Any, Path]]) -> None:
    from benchmarks.probe import probing
    from megatron_cg.tools.cpu.voting import train

    with probing():
        for plan, directory in jobs:
            train(plan, directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
