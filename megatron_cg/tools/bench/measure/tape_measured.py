"""One measured run on the CPU: ``python -m ...bench.measure.tape_measured PLAN DIRECTORY``.

PLAN is that of ``megatron_cg.tools.align.tape_worker``, which does the work. The environment has
the windows, as for a run on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

# Import this before Megatron: it prevents the import of Transformer Engine.
from megatron_cg.tools.align import tape_worker
from megatron_cg.upstream.patch import put_over, undone_after


def main(text: str, directory: str) -> None:
    """Train according to the plan; each process measures itself."""
    from megatron_cg.tools.cpu import launch

    with undone_after(put_over(launch, "run_plans", _run_measured)):
        tape_worker.main(text, directory)


def _run_measured(jobs: Sequence[tuple[Any, Path]], processes: int) -> None:
    from megatron_cg.tools.cpu.launch import run_processes

    run_processes(partial(_train, tuple(jobs)), processes)


def _train(jobs: Sequence[tuple[Any, Path]]) -> None:
    from megatron_cg.tools.bench.measure.eager_fast_path import EagerFastPath, is_given
    from megatron_cg.tools.bench.measure.measurement import Measurement
    from megatron_cg.tools.bench.measure.windows import given
    from megatron_cg.tools.cpu.voting import VotingTrainer, train

    windows, directory = given()
    measurement = Measurement(windows, Path(directory))
    fast_path = EagerFastPath(is_given(), windows.warmup)
    old_step, old_start = VotingTrainer.step, VotingTrainer.start

    def step(trainer: VotingTrainer) -> tuple[float, float]:
        if not trainer.plan.graphs:
            fast_path.before_step(lambda: (trainer.model, ()))
        measurement.before_step()
        result = old_step(trainer)
        measurement.after_step(result[0])
        return result

    def start(trainer: VotingTrainer) -> None:
        measurement.meter.helper = trainer
        with measurement.meter.measuring():
            old_start(trainer)

    with ExitStack() as undo:
        capture = partial(VotingTrainer.capture, fast_path=is_given())
        for name, function in (("capture", capture), ("step", step), ("start", start)):
            undo.callback(put_over(VotingTrainer, name, function))
        for plan, record in jobs:
            train(plan, record)
        measurement.close()
        fast_path.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
