"""Measures each part of the fast path: steps with all parts and with all but one, in turn.

    python -m benchmarks.fast_path --preset qwen3-moe --out parts.jsonl -- MEGATRON'S FLAGS

One run trains the preset with the graphs of ``megatron-cg bench``. Between two steps the fast path
is closed, and installed again without one part, then with all, then without the next part. So both
sides of a ratio lie seconds apart; two processes differ by more than most parts are worth. A part
is left out together with the parts that need it.
"""

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_cg.__main__ import CACHE_ENTRIES, CACHE_VARIABLE
from megatron_cg.capture.session import Session
from megatron_cg.fastpath.install_parts import FastPath
from megatron_cg.tools.align import run as align
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.bench import bench_command as bench
from megatron_cg.upstream.patch import Undo, set_attribute
from megatron_cg.upstream.symbols import Symbol

OUT, ROUNDS = "MEGATRON_CG_PARTS_OUT", "MEGATRON_CG_PARTS_ROUNDS"
"""What the run gets by its environment."""
ALL, NONE = "all parts", "no part"
WARMUP, SETTLE, TIMED = 20, 2, 6
"""Steps after the capture and after each change that are not timed, and those that are."""
_TRAIN_STEP = Symbol("megatron.training.training:train_step", "a step of Megatron's loop")
MIB = 2**20


def leave_out(left: str) -> Undo:
    """Let parts of this name, or all with ``NONE``, not be installed; returns the undo."""
    add: Callable[..., None] = FastPath.add

    def added(path: FastPath, name: str, *how: Any, **needs: Any) -> None:
        if left in (name, NONE):
            path.left_out[name] = "it is left out of a measurement"
        else:
            add(path, name, *how, **needs)

    return set_attribute(FastPath, "add", added)


def install_without(session: Any, left: str) -> None:
    """Install a session's fast path again, between two steps."""
    if (fsdp := session.sharding.megatron_fsdp) is not None:
        fsdp.zero_grad_buffer()  # The optimizer's gradients borrow memory of the graphs.
    session.fast_path.close()
    undo = leave_out(left)
    try:
        session._install_fast_path()
    finally:
        undo()


def windows(
    session: Any, parts: Sequence[str], rounds: int, timed: Callable[[str], Iterable[None]]
) -> Iterator[None]:
    """Change the parts and run ``timed`` steps of each kind; each item stands before a step."""
    yield from [None] * WARMUP
    yield from timed(ALL)
    for number in range(rounds):
        for part in [NONE, *parts][:: -1 if number % 2 else 1]:
            for left in (part, ALL):
                install_without(session, left)
                yield from timed(left)


def timed_to(out: Path) -> Callable[[str], Iterator[None]]:
    def timed(left: str) -> Iterator[None]:
        yield from [None] * SETTLE
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = [time.perf_counter()]
        for _ in range(TIMED):
            yield
            times.append(time.perf_counter())
        torch.cuda.synchronize()
        times[-1] = time.perf_counter()
        ms = [(after - before) * 1e3 for before, after in pairwise(times)]
        mib = torch.cuda.max_memory_allocated() / MIB
        if torch.distributed.get_rank() == 0:
            with out.open("a") as lines:
                line = {"without": left, "step_ms": ms, "allocated_mib": mib}
                print(json.dumps(line), file=lines)

    return timed


def measure(out: Path, rounds: int) -> None:
    """Train in this process of the run, and end it when everything has been measured."""
    undo = ExitStack()

    def first(session: Any) -> None:
        restore()
        session._install_fast_path()
        before = windows(session, tuple(session.fast_path.parts), rounds, timed_to(out))
        train_step = _TRAIN_STEP.find()

        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                next(before)
            except StopIteration:
                sys.exit(0)
            return train_step(*args, **kwargs)

        undo.callback(set_attribute(*_TRAIN_STEP.place(), step))

    restore = set_attribute(Session, "_install_fast_path", first)
    with undo:
        undo.callback(restore)
        runpy.run_path(str(align.example_script()), run_name="__main__")


def table(lines: Iterable[dict[str, Any]]) -> str:
    """For each part: ms a step beside those with all parts before and after it, and memory."""
    found = [(x["without"], statistics.median(x["step_ms"]), x["allocated_mib"]) for x in lines]
    rows = ["| without | ms | with all | longer, % | of each round, % | MiB more |"]
    rows.append("|---|---:|---:|---:|---|---:|")
    triples = list(zip(found, found[1:], found[2:], strict=False))
    for part in dict.fromkeys(name for name, _, _ in found if name != ALL):
        near = [(one, (a[1] + b[1]) / 2, a[2]) for a, one, b in triples if one[0] == part]
        ms = statistics.median(one[1] for one, _, _ in near)
        whole = statistics.median(beside for _, beside, _ in near)
        each = [(one[1] / beside - 1) * 100 for one, beside, _ in near]
        more = statistics.median(one[2] - mib for one, _, mib in near)
        ratios = ", ".join(f"{ratio:+.1f}" for ratio in each)
        longer = f"{statistics.median(each):+.1f}"
        rows.append(f"| {part} | {ms:.1f} | {whole:.1f} | {longer} | {ratios} | {more:+,.0f} |")
    drift = [abs(a[1] / b[1] - 1) * 100 for a, b in pairwise(x for x in found if x[0] == ALL)]
    rows.append(f"\nTwo windows with all parts differ by {statistics.median(drift):.1f}% (median).")
    return "\n".join(rows)


def main() -> int:
    """Start the run and print its table; in the run itself, measure."""
    if OUT in os.environ:
        measure(Path(os.environ[OUT]), int(os.environ[ROUNDS]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fast_path")
    parser.add_argument("--preset", required=True)
    parser.add_argument("--out", type=Path, required=True, help="the times, a JSON line a window")
    for name, default in {"nproc": 2, "microbatches": 2, "rounds": 4, "timeout": 570}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    words = [*sys.argv[1:], "--"]
    args = parser.parse_args(words[: words.index("--")])
    args.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data, steps = align.python_text(Path(folder, "data")), 2000 * args.rounds
        line = bench.preset_line(
            load_preset(args.preset),
            data,
            nproc=args.nproc,
            microbatches=args.microbatches,
            steps=steps,
            extra=words[words.index("--") + 1 : -1],
        )
        line = bench.edited(line, bench.GRAPHS, steps=steps)
        # A step that is logged ends with Megatron's synchronize().
        line = line.followed_by("--log-interval", "100")
        line = replace(line, script=str(Path(__file__).resolve()))
        env = align.environment({CACHE_VARIABLE: str(CACHE_ENTRIES), **os.environ})
        env = {n: env[n] for n in env if n not in align.DETERMINISTIC_ENVIRONMENT}
        env |= {OUT: str(args.out.resolve()), ROUNDS: str(args.rounds)}
        run = align.Run("graphs", line.command, env, Path(folder, "run"))
        if failure := run.make(args.timeout):
            print(f"{align.log_tail(run.text())}\nthe run {failure}")
    if args.out.exists():
        print(table(map(json.loads, args.out.read_text().splitlines())))
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
