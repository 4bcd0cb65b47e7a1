"""What the rows of a table of dependencies cost, on a real layer on the CPU.

The guards of a small dense and a small MoE layer, asked many times inside a forward pass and once
more inside a backward pass: the least of fifty repeats, in nanoseconds. The tape replaces the
graph; the state of FP8 is TE's and is not in it. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from megatron_cg.replay.guard import Guard, Mismatch
from megatron_cg.tape.launch import run_processes
from megatron_cg.telemetry import counts_text
from megatron_cg.tools.align.run import table
from megatron_cg.tools.cli.main import positive

REPEATS = 50
MODELS = ("dense", "moe")
Costs = dict[str, float]


class TimedGuard:
    """Instead of a guard: times each clause at the first call, and answers as the guard does.

    Args:
        guard: which one.
        calls: how often each clause is asked for one timing.
    """

    def __init__(self, guard: Guard, calls: int) -> None:
        self._guard, self._calls = guard, calls
        self.inputs, self.addresses = guard.inputs, guard.addresses
        self.costs: Costs = {}

    def broken(self, args: Sequence[Any], kwargs: Any) -> Mismatch | None:
        """See :meth:`Guard.broken`."""
        if not self.costs:
            guard: Any = self._guard
            clauses: dict[str, Callable[[], Any]] = {
                "inputs": partial(guard.inputs.broken, args, kwargs),
                "modes": guard._read_modes,
                "objects, key sets, frozen": guard._objects.broken,
                "hooks": guard._hooks.broken,
                "memory, forward": partial(guard.addresses.broken, forward=True),
                "all, forward": partial(guard.broken, args, kwargs),
            }
            self.costs = {name: self._timed(ask) for name, ask in clauses.items()}
        return self._guard.broken(args, kwargs)

    def broken_in_backward(self) -> Mismatch | None:
        """See :meth:`Guard.broken_in_backward`."""
        name = "memory, backward"
        if name not in self.costs:
            self.costs[name] = self._timed(self._guard.broken_in_backward)
        return self._guard.broken_in_backward()

    def _timed(self, ask: Callable[[], Any]) -> float:
        if (found := ask()) is not None and not isinstance(found, tuple):
            raise RuntimeError(f"a clause is broken, so its time means nothing: {found}")
        return min(timeit.repeat(ask, number=self._calls, repeat=REPEATS)) / self._calls * 1e9


def measure(experts: int, calls: int) -> Costs:
    """Nanoseconds by clause, of the first layer; needs cpu_fakes and a process group of one."""
    from megatron.core import parallel_state

    from megatron_cg.tape.tape_backend import TapeBackend
    from megatron_cg.tape.train import Trainer, transformer_layers
    from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan

    scopes = ("attn", "moe_router") if experts else ("attn", "mlp")
    model = CpuModelConfig(layers=2, experts=experts, graph_modules=scopes)
    trainer = Trainer(TrainingPlan(model, graphs=True))
    try:
        trainer.step()
        with closing(trainer.capture(TapeBackend())) as session:
            graph: Any = transformer_layers(trainer.model)[0].cuda_graphs[0]
            graph._guard = timed = TimedGuard(graph._guard, calls)
            trainer.step()
            counters = session.counters
            if counters.mismatched or counters.replayed != 2:
                raise RuntimeError(f"the step was not replayed: {counts_text(counters.as_dict())}")
        return timed.costs
    finally:
        parallel_state.destroy_model_parallel()


def _measure_all(path: Path, calls: int) -> None:
    costs = {name: measure(4 * (name == "moe"), calls) for name in MODELS}
    path.write_text(json.dumps(costs), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both models in a process of their own, and print the table."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.guard_cost", description=__doc__)
    made.add_argument("--calls", type=positive, default=200, help="of each clause (default 200)")
    args = made.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megatron-cg-guard-") as folder:
        path = Path(folder) / "costs.json"
        run_processes(partial(_measure_all, path, args.calls), 1)
        costs: dict[str, Costs] = json.loads(path.read_text(encoding="utf-8"))
    print("Rows of a table, ns, least of 50")
    rows = [["clause", *MODELS]]
    for clause in costs[MODELS[0]]:
        rows.append([clause, *(f"{costs[name][clause]:,.0f}" for name in MODELS)])
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
