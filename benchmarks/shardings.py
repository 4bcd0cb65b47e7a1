"""A plain transformer under each way of sharding: eager, with graphs, and by torch.compile.

    python -m benchmarks.shardings --out results              # one GPU
    torchrun --nproc-per-node 2 -m benchmarks.shardings --out results

The model is that of ``examples/standalone_transformer.py`` in BF16. All ways of running it take
turns in one process, round after round. ``compile`` is ``torch.compile(mode="reduce-overhead")`` of
each layer. Writes ``shardings.json`` and a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from examples.standalone_transformer import SHARDINGS, Transformer
from megatron_cg import graph_units

WAYS = ("eager", "te", "native", "compile")
WARMUP, SETTLE = 3, 3
MIB = 2**20
Measured = dict[str, float]


def measure(args: argparse.Namespace, sharding: str, way: str) -> Measured:
    """Train a new model in one way.

    Returns:
        ``step_ms`` (median), ``slowest_ms`` and ``fastest_ms`` of the timed steps, ``first_ms`` of
        the longest step before them (capture or compilation), ``allocated_mib`` and
        ``reserved_mib`` (peaks from the start of training), ``copied_bytes`` a step, ``loss``.
    """
    torch.manual_seed(1)
    network = Transformer(args.layers, args.hidden, args.sequence, dropout=0.0)
    network = network.to("cuda", torch.bfloat16)
    if way == "compile":
        for layer in network.layers:
            layer.compile(mode="reduce-overhead")
    model, optimizer = SHARDINGS[sharding](network, "cuda")
    summed = dist.get_world_size() if sharding == "megatron-fsdp" else 1
    graphs: Any = nullcontext()
    if way in ("te", "native"):
        backend: Any = way
        graphs = graph_units(model, ["layers.*"], warmup_steps=WARMUP, backend=backend)
    tokens = torch.randint(256, (args.batch, args.sequence + 1), device="cuda")
    clear()
    times, loss = [], torch.zeros(())
    with graphs:
        for _ in range(WARMUP + SETTLE + args.steps):
            begin = time.perf_counter()
            with graphs.step() if way in ("te", "native") else nullcontext():
                optimizer.zero_grad()
                for _ in range(args.microbatches):
                    logits = model(tokens[:, :-1]).float()
                    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                    (loss / args.microbatches / summed).backward()
                optimizer.step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        copied = 0.0
        if way in ("te", "native"):
            counters = graphs.counters
            total = counters.bytes_copied + counters.gradient_bytes_copied
            copied = total / (SETTLE + args.steps)
    timed = times[-args.steps :]
    return {
        "step_ms": statistics.median(timed),
        "fastest_ms": min(timed),
        "slowest_ms": max(timed),
        "first_ms": max(times[: -args.steps]),
        "allocated_mib": torch.cuda.max_memory_allocated() / MIB,
        "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "copied_bytes": copied,
        "loss": float(loss.detach()),
    }


def clear() -> None:
    """Forget what earlier models left, so that peaks are those of the next one."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for, in turn; an error is kept as its text."""
    found: dict[str, Any] = {}
    for sharding in args.shardings:
        for _round in range(args.rounds):
            for way in args.ways:
                key = f"{sharding} {way}"
                clear()
                try:
                    found.setdefault(key, []).append(measure(args, sharding, way))
                except Exception as error:
                    found.setdefault(key, []).append({"error": f"{type(error).__name__}: {error}"})
                if dist.get_rank() == 0:
                    print(key, found[key][-1], flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: the median of the rounds, and ratios to eager in the same sharding."""
    lines = [
        "| sharding | | step, ms | of eager | peak, MiB | of eager | copied a step, MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for key, rounds in found.items():
        sharding, way = key.rsplit(" ", 1)
        good = [one for one in rounds if "error" not in one]
        if not good:
            lines.append(f"| {sharding} | {way} | failed | | | | |")
            continue
        base = [one for one in found.get(f"{sharding} eager", []) if "error" not in one]
        step, memory, copied = (
            statistics.median(one[name] for one in good)
            for name in ("step_ms", "allocated_mib", "copied_bytes")
        )
        ratios = ["", ""]
        if base:
            of = [
                statistics.median(one[name] for one in base)
                for name in ("step_ms", "allocated_mib")
            ]
            ratios = [f"{step / of[0]:.2f}", f"{memory / of[1]:.3f}"]
        lines.append(
            f"| {sharding} | {way} | {step:.2f} | {ratios[0]} | {memory:.0f} | {ratios[1]} "
            f"| {copied / MIB:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in this process, or in those of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shardings", nargs="+", choices=SHARDINGS, default=list(SHARDINGS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    numbers = {"layers": 12, "hidden": 1024, "sequence": 512, "batch": 2, "microbatches": 2}
    for name, default in (numbers | {"steps": 20, "rounds": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(arguments)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = run(args)
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        options = {name: str(value) for name, value in vars(args).items()}
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "gpus": dist.get_world_size(),
            "torch": torch.__version__,
            "options": options,
        }
        text = json.dumps({"machine": machine, "measured": found}, indent=1)
        (args.out / "shardings.json").write_text(text + "\n")
        print(table(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
