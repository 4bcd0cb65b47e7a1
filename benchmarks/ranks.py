"""Host time of a step as a function of the number of ranks, by simulation on one CPU.

    python -m benchmarks.ranks

One process is rank 0 of a fake process group: collectives return at once, and everything else that
Megatron-FSDP's Python does for a rank is done. The model is Megatron's, with Qwen3-MoE's number of
layers and experts and tiny sizes, so nearly all CPU time is host work: modules, autograd, hooks and
the sharding's bookkeeping. Prints the CPU time of a step, eager and with the fast path for FSDP's
host work. Weights are not gathered, so losses mean nothing. The parts of the fast path for
Transformer Engine's grouped GEMM are not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_cg.tools.cpu.fakes import cpu_fakes, replaced
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

LAYERS, EXPERTS = 8, 64
LAYOUTS = ((2, 1), (8, 1), (64, 1), (1024, 1), (2, 2), (8, 8), (64, 8), (1024, 8), (64, 64))
"""Ranks, and how many of them share the experts."""


class Measured(NamedTuple):
    """Of rank 0; times are medians, in milliseconds of CPU time."""

    eager: float
    fast: float
    """With the fast path."""
    parts: Sequence[str]
    """What the fast path has installed."""
    experts: int
    """On this rank, of a layer."""


def measure(ranks: int, expert_parallel: int, steps: int) -> Measured:
    """Train rank 0 of so many."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    from megatron_cg import fastpath
    from megatron_cg.tools.cpu.train import Trainer

    shape = CpuModelConfig(
        layers=LAYERS,
        hidden_size=16,
        ffn_hidden_size=16,
        sequence_length=8,
        experts=EXPERTS,
        grouped=True,
        expert_parallel=expert_parallel,
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with ExitStack() as undo:
        undo.callback(dist.destroy_process_group)
        undo.enter_context(cpu_fakes())
        # Megatron keeps it for the process, with a place for each layer of the model that made it.
        destroy_moe_metrics_tracker()
        undo.callback(destroy_moe_metrics_tracker)
        begin = partial(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
        undo.enter_context(replaced(parallel_state, "initialize_model_parallel", begin))
        trainer = Trainer(TrainingPlan(shape, microbatches=2))
        undo.callback(parallel_state.destroy_model_parallel)
        step = trainer.step
        eager = _median(step, steps)
        fast_path = fastpath.install(trainer.model.module)
        undo.callback(fast_path.close)
        experts = {m.num_local_experts for m in trainer.model.modules() if isinstance(m, MoELayer)}
        return Measured(eager, _median(step, steps), list(fast_path.parts), *experts)


def _median(step: Callable[[], Any], steps: int) -> float:
    for _ in range(2):
        step()
    times = []
    for _ in range(steps):
        begun = time.process_time()
        step()
        times.append(time.process_time() - begun)
    return statistics.median(times) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each layout, and print the table."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    made.add_argument("--steps", type=int, default=10, help="of each way (default 10)")
    args = made.parse_args(argv)
    torch.set_num_threads(1)
    table = Table(title="Host time of a step, ms of CPU time on rank 0")
    for name in ("ranks", "EP", "experts a rank", "eager", "fast path"):
        table.add_column(name, justify="right")
    with redirect_stdout(sys.stderr):
        for ranks, expert_parallel in LAYOUTS:
            found = measure(ranks, expert_parallel, args.steps)
            shown = (ranks, expert_parallel, found.experts)
            table.add_row(*map(str, shown), f"{found.eager:.0f}", f"{found.fast:.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
