"""A plain transformer under each way of sharding: eager, with graphs, and by torch.compile.

    python -m benchmarks.shardings fsdp2 native --out results              # one GPU
    torchrun --nproc-per-node 2 -m benchmarks.shardings fsdp2 native --out results
    python -m benchmarks.shardings --table results

One process measures one way of running one sharding, so that peaks of memory are its own, and adds
a line to ``shardings.jsonl``. Run the ways in turn, several times. The model is that of
``examples/standalone_transformer.py`` in BF16. ``compile`` is
``torch.compile(mode="reduce-overhead")`` of each layer, and of the whole network under DDP.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from examples.standalone_transformer import SHARDINGS, Transformer, ranks_summed
from megatron_cg import graph_units

GRAPHS = ("te", "native")
WAYS = ("eager", *GRAPHS, "compile")
WARMUP, SETTLE = 3, 5
MIB = 2**20
RESULTS = "shardings.jsonl"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train a new model in one way.

    Returns:
        ``step_ms`` (median), ``slowest_ms`` and ``fastest_ms`` of the timed steps; ``first_ms``,
        all steps before them, with capture or compilation; ``allocated_mib`` and ``reserved_mib``,
        peaks of the timed steps; ``copied_bytes`` of a step; ``loss`` of the last step.
    """
    torch.manual_seed(1)
    network = Transformer(args.layers, args.hidden, args.sequence, dropout=0.0)
    network = network.to("cuda", torch.bfloat16)
    if args.way == "compile":
        # FSDP's hooks are between the layers. DDP's are not in the network.
        for module in (network,) if args.sharding == "ddp" else network.layers:
            module.compile(mode="reduce-overhead")
    model, optimizer = SHARDINGS[args.sharding](network, "cuda")
    graphed = args.way in GRAPHS
    graphs: Any = nullcontext()
    if graphed:
        graphs = graph_units(model, ["layers.*"], warmup_steps=WARMUP, backend=args.way)
    tokens = torch.randint(256, (args.batch, args.sequence + 1), device="cuda")
    times, loss, settled = [], torch.zeros(()), WARMUP + SETTLE
    with graphs:
        for number in range(settled + args.steps):
            if number == settled:
                gc.collect()
                gc.disable()
                torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            with graphs.step() if graphed else nullcontext():
                loss = step(args, model, optimizer, tokens)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        copied = 0.0
        if graphed:
            counters = graphs.counters
            total = counters.bytes_copied + counters.gradient_bytes_copied
            copied = total / (SETTLE + args.steps)
    timed = times[settled:]
    return {
        "step_ms": statistics.median(timed),
        "fastest_ms": min(timed),
        "slowest_ms": max(timed),
        "first_ms": sum(times[:settled]),
        "allocated_mib": torch.cuda.max_memory_allocated() / MIB,
        "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "copied_bytes": copied,
        "loss": float(loss),
    }


def step(
    args: argparse.Namespace, model: Any, optimizer: Any, tokens: torch.Tensor
) -> torch.Tensor:
    """One training step; returns the last loss."""
    summed = ranks_summed(args.sharding)
    optimizer.zero_grad()
    for _ in range(args.microbatches):
        if args.way == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        logits = model(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / args.microbatches / summed).backward()
    optimizer.step()
    return loss.detach()


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: medians over the runs, and ratios to eager runs of the same sharding."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        runs[line["sharding"], line["way"]].append(line)

    def median(sharding: str, way: str, name: str) -> float:
        found = [run[name] for run in runs[sharding, way] if "error" not in run]
        return statistics.median(found) if found else float("nan")

    rows = [
        "| sharding | | runs | step, ms | of eager | first steps, s | peak, MiB | of eager "
        "| copied a step, MiB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for sharding, way in list(runs):
        values = {
            name: median(sharding, way, name)
            for name in ("step_ms", "first_ms", "allocated_mib", "copied_bytes")
        }
        time_ratio, memory_ratio = (
            values[name] / median(sharding, "eager", name) for name in ("step_ms", "allocated_mib")
        )
        rows.append(
            f"| {sharding} | {way} | {len(runs[sharding, way])} | {values['step_ms']:.2f} "
            f"| {time_ratio:.2f} | {values['first_ms'] / 1e3:.1f} "
            f"| {values['allocated_mib']:.0f} | {memory_ratio:.3f} "
            f"| {values['copied_bytes'] / MIB:.1f} |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in this process, or in those of torchrun; or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sharding", nargs="?", choices=SHARDINGS, default="fsdp2")
    parser.add_argument("way", nargs="?", choices=WAYS, default="native")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--table", type=Path, metavar="DIR")
    numbers = {"layers": 12, "hidden": 1024, "sequence": 512, "batch": 2, "microbatches": 2}
    for name, default in (numbers | {"steps": 40}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)
    if args.table is not None:
        lines = (args.table / RESULTS).read_text().splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    single = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    for name, value in single.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "gpus": dist.get_world_size()}
    left_out = ("out", "table")
    found |= {name: str(value) for name, value in vars(args).items() if name not in left_out}
    try:
        found |= measure(args)
    except RuntimeError as error:  # What torch.compile cannot do is a result too.
        found["error"] = str(error).splitlines()[0]
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / RESULTS).open("a") as file:
            print(json.dumps(found), file=file)
        print(found, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
