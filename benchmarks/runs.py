"""An eager run and one with graphs, started as ``megatron-cg align`` starts them, and measured."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import measured
from megatron_cg.tools.align.command import Plan, arguments, environment
from megatron_cg.tools.align.compare import FAILED
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.align.processes import LaunchError, Options, Run, run_and_compare
from megatron_cg.tools.align.run import gpu_count, torch_cudnn
from megatron_cg.tools.align.tape import tape_shape
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.bench.commands import as_inherited

TRANSFORMER_ENGINE, TAPE = "transformer_engine", "tape"
NAMES = ("eager", "graphs")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Request:
    """What is trained twice, and where."""

    preset: Preset
    backend: str
    nproc: int
    steps: int
    warmup_steps: int = 3
    scopes: tuple[str, ...] | None = None
    """The preset's if None."""
    extra: tuple[str, ...] = ()
    """Megatron's flags for both runs, for GPUs only."""
    deterministic: bool = False
    """Whether GPUs train as they do to be compared bit for bit, which is slower."""

    @property
    def chosen_scopes(self) -> tuple[str, ...]:
        """What is captured: those that were given, or else the preset's for this backend."""
        if self.scopes is not None:
            return self.scopes
        return tape_shape(self.preset).scopes if self.backend == TAPE else self.preset.scopes


def records(request: Request, data: TokenStream, directory: Path, timeout: float) -> Outcome:
    """Make both runs, in turn, in ``directory``; ``timeout`` seconds each.

    Raises LaunchError when they cannot be made as asked, or one of them failed.
    """
    make = _on_tape if request.backend == TAPE else _on_gpus
    outcome = run_and_compare(make(request, data, directory), Options(directory, timeout))
    if outcome.eager is None or outcome.graphed is None or outcome.comparison.status == FAILED:
        raise LaunchError(f"{outcome.comparison.reason}.\n{outcome.log_tail}")
    return outcome


def _on_gpus(request: Request, data: TokenStream, directory: Path) -> list[Run]:
    if gpu_count() < request.nproc:
        raise LaunchError(
            f"--nproc {request.nproc} needs as many GPUs, and {gpu_count()} can be seen: give a "
            "smaller --nproc, or --backend tape to see that the benchmark works."
        )
    plan = Plan(
        script=Path(measured.__file__),
        nproc=request.nproc,
        model=tuple(request.preset.arguments()),
        steps=request.steps,
        scopes=request.chosen_scopes,
        warmup_steps=request.warmup_steps,
        extra=request.extra,
    )
    runs = []
    for name in NAMES:
        folder = directory / name
        flags = data.flags(folder / "cache")
        record = folder / "record"
        words = arguments(plan, graphs=name == "graphs", data=flags, record=record)
        env = environment(os.environ, root=_ROOT, cudnn=torch_cudnn())
        if not request.deterministic:
            words = [word for word in words if word != "--deterministic-mode"]
            env = as_inherited(env, os.environ)
        runs.append(Run(name, words, env, folder))
    return runs


def _on_tape(request: Request, data: TokenStream, directory: Path) -> list[Run]:
    if request.extra:
        raise LaunchError(
            f"the tape has a training loop of its own and cannot take {' '.join(request.extra)}: "
            f"leave it out, or give --backend {TRANSFORMER_ENGINE} on a machine with GPUs."
        )
    shape = tape_shape(request.preset)
    plan = {
        "shape": asdict(shape) | {"scopes": list(request.chosen_scopes)},
        "steps": request.steps,
        "warmup_steps": request.warmup_steps,
        "processes": request.nproc,
        "tokens": str(data.prefix),
    }
    env = environment(os.environ, root=_ROOT, cudnn=None) | {"CUDA_VISIBLE_DEVICES": ""}
    runs = []
    for name in NAMES:
        folder = directory / name
        words = [sys.executable, "-m", "benchmarks.tape_run"]
        words += [json.dumps(plan | {"graphs": name == "graphs"}), str(folder / "record")]
        runs.append(Run(name, words, env, folder))
    return runs
