"""What Megatron-FSDP's own bookkeeping takes of the host in a step, with the fast path and without.

The real Megatron-FSDP around a small MoE model, two gloo processes, no graphs: what is
timed is Python, which is the same whatever the tensors' sizes are. Collectives are timed apart, and
a function's time is without that of other functions in this table. Functions that wait for gloo
inside a coalesced collective are shown in brackets and left out of the sum. Prints the medians over
steps, in ms, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_cg.files import write_text
from megatron_cg.tools.cpu.launch import run_processes

WAITING = ("_bucket_group_gradient_reduce", "all_gather_params", "wait_bucket_ready")
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "barrier")
METHODS = {
    "": (
        "all_gather_and_wait_parameters_ready",
        "_replace_param_with_distributed_if_needed",
        "_replace_param_with_raw_if_needed",
        "finish_grad_sync",
        "start_param_sync",
    ),
    "param_and_grad_buffer": (
        "update_main_grads",
        "copy_main_weights_to_model_weights",
        "zero_grad",
    ),
    "all_gather_pipeline": (
        "all_gather_params",
        "async_bucket_gather",
        "release_bucket",
        "wait_bucket_ready",
        "reset",
    ),
    "grad_reduce_pipeline": ("reduce_gradients", "_bucket_group_gradient_reduce", "reset"),
}
CELLS = (
    "_param_list_for_submodule_unshard",
    "release_module_parameters",
    "_process_post_backward_gradients",
)


@dataclass(frozen=True)
class Shape:
    """Of the model; each expert of a layer has two parameters."""

    layers: int = 4
    experts: int = 32
    microbatches: int = 2
    steps: int = 12


class Stopwatch:
    """Times of functions by name, each without that of the others called from it, in ms a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, counted under ``name``."""

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - start
                own = whole - self._inner.pop()
                self._inner[-1] += whole
                if self.steps:
                    self.steps[-1][name] = self.steps[-1].get(name, 0.0) + own * 1e3

        return measured

    def medians(self) -> dict[str, float]:
        """By name, over the steps."""
        names = {name for step in self.steps for name in step}
        return {n: statistics.median(step.get(n, 0.0) for step in self.steps) for n in names}


def measure(shape: Shape, fast: bool, file: Path) -> None:
    """In one of two processes: train, and write what each function took."""
    from megatron_cg.fastpath import install
    from megatron_cg.fastpath.hook_closures import find_cell, hook_functions
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    model = CpuModelConfig(
        layers=shape.layers, experts=shape.experts, hidden_size=16, ffn_hidden_size=16, heads=2
    )
    trainer: Any = Trainer(TrainingPlan(model, microbatches=shape.microbatches))
    for _ in range(2):
        trainer.step()
    fsdp = trainer.model.module
    if fast:
        install(fsdp)
    watch = Stopwatch()
    for owner, names in METHODS.items():
        target = getattr(fsdp, owner) if owner else fsdp
        for name in names:
            shown = f"({name})" if name in WAITING else name
            setattr(target, name, watch.timed(shown, getattr(target, name)))
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        buffer = group.model_weight_buffer
        buffer.fetch_bucket = watch.timed("fetch_bucket of weights", buffer.fetch_bucket)
    functions = list(hook_functions(fsdp))
    for name in CELLS:
        cell = find_cell(functions, name)
        cell.cell_contents = watch.timed(name, cell.cell_contents)
    for name in COLLECTIVES:
        setattr(dist, name, watch.timed("(collectives)", getattr(dist, name)))
    for _ in range(shape.steps):
        watch.steps.append({})
        trainer.step()
    if dist.get_rank() == 0:
        parameters = len(fsdp.param_and_grad_buffer.params)
        file.write_text(json.dumps({"parameters": parameters, "ms": watch.medians()}))


def table_of(plain: dict[str, Any], fast: dict[str, Any]) -> Table:
    """A row a function, the dearest first, and their sum without collectives."""
    table = Table(title=f"Host time of Megatron-FSDP a step, {plain['parameters']} parameters")
    for heading in ("function", "own, ms", "fast path, ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    names = sorted(plain["ms"].keys() | fast["ms"].keys(), key=lambda n: -plain["ms"].get(n, 0.0))
    rows = [(n, plain["ms"].get(n, 0.0), fast["ms"].get(n, 0.0)) for n in names]
    own = [row for row in rows if not row[0].startswith("(")]
    total = ("all that is not in brackets", sum(r[1] for r in own), sum(r[2] for r in own))
    for name, before, after in (*rows, total):
        ratio = f"{after / before:.2f}" if before else "-"
        table.add_row(name, f"{before:.2f}", f"{after:.2f}", ratio, end_section=name == rows[-1][0])
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fsdp_host", description=__doc__)
    for name, default in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="write the metrics here too")
    args = vars(parser.parse_args(argv))
    path = args.pop("json")
    shape = Shape(**args)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "fast"):
            file = Path(folder, f"{name}.json")
            run_processes(partial(measure, shape, name == "fast", file))
            found[name] = json.loads(file.read_text())
    if path is not None:
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        write_text(path, json.dumps({"shape": asdict(shape), **machine, **found}, indent=1))
    Console().print(table_of(found["plain"], found["fast"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
