"""What votes on guards cost at each call of a small compiled region, on ranks of this machine.

A call without votes, with ``compile_together()``, and with torch's own guard collectives on gloo:
microseconds of a call on rank 0, the fastest tenth and the median of many. Prints a table. On a
machine with fewer free cores than ranks, the scheduler is in the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_cg import compile_together
from megatron_cg.tools.cli.options import positive
from megatron_cg.tools.cpu.launch import run_processes


@contextmanager
def torchs_own() -> Iterator[None]:
    """Torch's guard collectives."""
    torch.compiler.set_enable_guard_collectives(True)
    try:
        yield
    finally:
        torch.compiler.set_enable_guard_collectives(False)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no votes": nullcontext,
    "compile_together()": compile_together,
    "torch's guard collectives": torchs_own,
}


def measure(calls: int) -> dict[str, tuple[float, float]]:
    """Microseconds of a call by way, first decile and median; all ranks call this together."""
    batch = torch.ones(8)
    costs = {}
    for name, way in WAYS.items():
        torch.compiler.reset()
        region = torch.compile(lambda values: values + 1, backend="eager")
        with way():
            times = []
            for call in range(calls + 2):  # the first compiles, the second makes torch's group
                begun = time.perf_counter()
                region(batch)
                if call > 1:
                    times.append(time.perf_counter() - begun)
        fastest = statistics.quantiles(times, n=10, method="inclusive")[0]
        costs[name] = (fastest * 1e6, statistics.median(times) * 1e6)
        dist.barrier()
    return costs


def _measure(path: Path, calls: int) -> None:
    costs = measure(calls)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(costs), encoding="utf-8")


def _both(fastest: float, median: float) -> str:
    return f"{fastest:,.0f}, {median:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on each number of ranks, and print the table."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled_regions", description=__doc__
    )
    made.add_argument("--calls", type=positive, default=500, help="of each way (default 500)")
    made.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], help="default 2 4")
    args = made.parse_args(argv)
    if args.calls < 2:
        made.error("argument --calls: a decile is of 2 calls or more")
    found: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="megatron-cg-regions-") as folder:
        for ranks in args.ranks:
            path = Path(folder) / f"{ranks}.json"
            run_processes(partial(_measure, path, args.calls), ranks)
            found[ranks] = json.loads(path.read_text(encoding="utf-8"))
    table = Table("a call", title="A call of a compiled region, µs: first decile, median")
    for ranks in found:
        table.add_column(f"{ranks} ranks", justify="right")
    for name in WAYS:
        table.add_row(name, *(_both(*costs[name]) for costs in found.values()))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
