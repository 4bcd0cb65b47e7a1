"""Measures what each part of the fast path is worth, in one run.

    python -m benchmarks.fast_path_parts qwen3-moe --out parts
    python -m benchmarks.fast_path_parts llama --nproc 1 --parts clipping,last-unit --out parts

One run trains the preset with graphs. It trains some steps without a part, then some with all
parts, then some without the next part: before each of them the graphs are captured again. So both
sides of a ratio lie seconds apart. Two processes drift by more than most parts are worth.
cuBLASLt's cache has the same size throughout, since it is read once per process.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_cg.arguments.fast_path_parts import PARTS, mistakes, with_dependents
from megatron_cg.fastpath import heuristics, install
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp
from megatron_cg.integrations.megatron.helper import FsdpCudaGraphHelper
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.run import example_script
from megatron_cg.tools.align.token_data import from_text, python_sources
from megatron_cg.tools.bench.runs.commands import Settings, script_words
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import lookup

VARIABLE = "MEGATRON_CG_FAST_PATH_PARTS"
"""The environment variable that holds the plan of a run, as JSON."""
CACHE = {heuristics.VARIABLE: str(heuristics.ENTRIES)}
ALL, PLAIN = "all parts", "graphs, but no part"
EAGER, EAGER_FAST = "eager", "eager with all parts"
BASELINES: dict[str, tuple[str, ...]] = {EAGER: (), EAGER_FAST: PARTS, PLAIN: ()}
RESULTS = "steps.jsonl"


@dataclass(frozen=True)
class Plan:
    """What a run measures: numbers of steps, and where the results go."""

    out: str
    parts: tuple[str, ...]
    """The parts that are left out, one at a time."""
    baselines: bool = True
    """Whether eager steps and graphs without any part are measured too."""
    rounds: int = 2
    warmup: int = 20
    """Steps after the first capture that are not timed."""
    settle: int = 4
    """Steps after each change that are not timed."""
    timed: int = 12

    def variants(self) -> dict[str, tuple[str, ...]]:
        """The parts that are installed in each variant, by what it leaves out."""
        left_out = {
            part: tuple(name for name in PARTS if name not in with_dependents(part))
            for part in self.parts
        }
        return (BASELINES if self.baselines else {}) | left_out


class Ablation:
    """Changes the parts between steps, and times each step up to the start of the next one."""

    def __init__(self, plan: Plan) -> None:
        self.helper: FsdpCudaGraphHelper | None = None
        """The helper of the model, once it has captured."""
        self._plan = plan
        self._eager_parts = ExitStack()
        self._schedule = self._windows()

    def before_step(self, model: Any, optimizer: Any) -> bool:
        """Change what is due. Returns False when everything has been measured."""
        self._model, self._optimizer = model, optimizer
        return self.helper is None or next(self._schedule, None) is not None

    def _windows(self) -> Iterator[str]:
        yield from [ALL] * self._plan.warmup
        yield from self._window(ALL, change=False)
        names = list(self._plan.variants())
        for number in range(self._plan.rounds):
            for name in names[:: -1 if number % 2 else 1]:
                yield from self._window(name)
                yield from self._window(ALL)

    def _window(self, name: str, *, change: bool = True) -> Iterator[str]:
        if change:
            self._turn_to(name)
        yield from [name] * self._plan.settle
        torch.cuda.synchronize()
        starts = []
        for _ in range(self._plan.timed):
            starts.append(time.perf_counter())
            yield name
        torch.cuda.synchronize()
        starts.append(time.perf_counter())
        steps = [(after - before) * 1e3 for before, after in pairwise(starts)]
        if int(os.environ.get("RANK", "0")) == 0:
            with (Path(self._plan.out) / RESULTS).open("a") as lines:
                lines.write(json.dumps({"variant": name, "step_ms": steps}) + "\n")

    def _turn_to(self, name: str) -> None:
        assert self.helper is not None
        controller = self.helper.controller
        assert controller is not None
        self._eager_parts.close()
        # The pending vote is about the graphs that are deleted here.
        self.helper._agreement.collect()
        if name not in (EAGER, EAGER_FAST):
            self.helper.fast_path = PARTS if name == ALL else self._plan.variants()[name]
            controller.recapture()
            return
        controller.delete()
        if parts := BASELINES[name]:
            fsdp, optimizers = find_megatron_fsdp(self._model), [self._optimizer]
            path = install(fsdp, optimizers=optimizers, parts=parts)
            self._eager_parts.callback(path.close)


def measuring(ablation: Ablation) -> ExitStack:
    """Follow the first capture and the steps of ``pretrain``; ``close`` of the result stops it."""
    undo = ExitStack()
    loop = lookup("megatron-core", "megatron.training.training", "Megatron's training loop")
    capture, train = FsdpCudaGraphHelper._capture_under_fsdp, loop.train

    def followed(helper: FsdpCudaGraphHelper) -> Any:
        session = capture(helper)
        ablation.helper = helper
        return session

    @wraps(train)
    def measured_train(*args: Any, **kwargs: Any) -> Any:
        undo.callback(put_over(loop, "train_step", _step(loop.train_step, ablation)))
        return train(*args, **kwargs)

    undo.callback(put_over(FsdpCudaGraphHelper, "_capture_under_fsdp", followed))
    undo.callback(put_over(loop, "train", measured_train))
    return undo


def _step(old: Callable[..., Any], ablation: Ablation) -> Callable[..., Any]:
    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        # The third and fourth arguments are the model's chunks and the optimizer.
        if not ablation.before_step(args[2][0], args[3]):
            raise SystemExit(0)
        return old(*args, **kwargs)

    return train_step


def table(directory: Path) -> str:
    """The results as Markdown: each variant beside the steps with all parts around it."""
    lines = [json.loads(line) for line in (directory / RESULTS).read_text().splitlines()]
    windows = [(line["variant"], statistics.median(line["step_ms"])) for line in lines]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (_, before), (name, step), (_, after) in zip(
        windows, windows[1:], windows[2:], strict=False
    ):
        if name != ALL:
            found[name].append((step, (before + after) / 2))
    whole = [step for name, step in windows if name == ALL]
    drift = statistics.median(abs(b / a - 1) for a, b in pairwise(whole)) * 100
    rows = [
        f"All parts: {statistics.median(whole):.1f} ms a step. Between two windows with all parts "
        f"this number changes by {drift:.1f}% (median).\n",
        "| left out | ms a step | % of a step | of each round, % |",
        "|---|---:|---:|---|",
    ]
    longer = {name: statistics.mean(a - b for a, b in pairs) for name, pairs in found.items()}
    for name in sorted(found, key=lambda name: -longer[name]):
        percent = [(step / beside - 1) * 100 for step, beside in found[name]]
        each = ", ".join(f"{value:+.1f}" for value in percent)
        mean = statistics.mean(percent)
        rows.append(f"| {_label(name)} | {longer[name]:+.1f} | {mean:+.1f} | {each} |")
    return "\n".join(rows)


def _label(variant: str) -> str:
    if variant not in PARTS:
        return variant
    others = [part for part in PARTS if part in with_dependents(variant) - {variant}]
    return f"`{variant}`" + (f", with `{'`, `'.join(others)}`" if others else "")


def command(preset: str, nproc: int, data: Path, more: list[str]) -> list[str]:
    """The command line of the run."""
    settings = Settings(load_preset(preset), nproc, extra=tuple(more))
    stream = from_text(python_sources(), data, "the sources of Python's own library")
    words = script_words(settings, "fsdp-graphs", stream.flags(data / "cache"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    launched = ["-m", "megatron_cg", str(Path(__file__).resolve()), *words]
    # The run ends before that, when everything has been measured.
    return [sys.executable, *launcher, *launched, "--train-iters", "1000000"]


def main() -> int:
    """Start the run and print its table; or, in the run itself, train and measure."""
    if VARIABLE in os.environ:
        given = json.loads(os.environ[VARIABLE])
        with measuring(Ablation(Plan(**given | {"parts": tuple(given["parts"])}))):
            runpy.run_path(str(example_script()), run_name="__main__")
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fast_path_parts")
    parser.add_argument("preset")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--nproc", type=int, default=2, help="GPUs (default: 2)")
    parser.add_argument("--rounds", type=int, default=2, help="of all variants (default: 2)")
    parser.add_argument("--parts", help="PART,PART (default: all parts, eager, and no part)")
    given_words = sys.argv[1:]
    end = given_words.index("--") if "--" in given_words else len(given_words)
    args = parser.parse_args(given_words[:end])
    # Without experts or with the variable of CACHE, this part is not installed at all.
    every = tuple(part for part in PARTS if part != "gemm-heuristics")
    parts = tuple(args.parts.split(",")) if args.parts else every
    for found, why, instead in mistakes([*parts, *PARTS]):
        parser.error(f"--parts {found}: {why}; {instead}.")
    args.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(str(args.out.resolve()), parts, not args.parts, args.rounds)
    words = command(args.preset, args.nproc, args.out / "data", given_words[end + 1 :])
    given_plan = {VARIABLE: json.dumps(asdict(plan))}
    ended = subprocess.run(words, env=os.environ | CACHE | given_plan, check=False)
    print(table(args.out))
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
