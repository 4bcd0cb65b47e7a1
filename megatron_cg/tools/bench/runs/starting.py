"""Makes the process of one run: under torchrun on GPUs, or on the CPU with the tape."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_cg.tools.align.command import environment
from megatron_cg.tools.align.processes import Run
from megatron_cg.tools.align.run import gpu_count, torch_cudnn
from megatron_cg.tools.align.tape import tape_shape
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.measure.eager_fast_path import variable
from megatron_cg.tools.bench.measure.windows import VARIABLE
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun
from megatron_cg.tools.bench.runs.commands import DEFAULT, METRICS, command, run_environment
from megatron_cg.tools.bench.runs.configurations import KNOWN
from megatron_cg.tools.bench.runs.shapes import is_hybrid

_ROOT = Path(__file__).resolve().parents[4]


def on_gpus(data: TokenStream, run: PlannedRun, folder: Path) -> Run:
    """A run of the example script under torchrun; all runs share one sample index."""
    settings, configuration = run.settings, KNOWN[run.configuration]
    flags = data.flags(data.prefix.parent / "cache")
    words = command(settings, run.configuration, flags)
    env = run_environment(
        settings, os.environ, root=_ROOT, cudnn=torch_cudnn(), metrics=folder / METRICS
    )
    if configuration.graphs == "none":
        env |= variable(configuration.fast_path)
    return Run(run.name, words, env, folder)


def refused_on_gpus(run: PlannedRun) -> str:
    """Why a run is impossible here: too few GPUs, or no kernels for Mamba layers."""
    if (found := gpu_count()) < run.settings.nproc:
        return f"it needs {run.settings.nproc} GPUs, and {found} can be seen"
    if is_hybrid(run.settings.preset) and importlib.util.find_spec("mamba_ssm") is None:
        return "it needs the package mamba-ssm, which is not installed"
    return ""


def on_tape(data: TokenStream, run: PlannedRun, folder: Path) -> Run:
    """A run of the preset's small shape on the CPU, whose processes gloo connects."""
    settings, configuration = run.settings, KNOWN[run.configuration]
    shape = tape_shape(settings.preset)
    plan = {
        "shape": asdict(shape) | {"scopes": list(settings.chosen_scopes)},
        "steps": settings.windows.steps,
        "warmup_steps": settings.windows.warmup,
        "processes": settings.nproc,
        "tokens": str(data.prefix),
        "graphs": configuration.graphs == "partial",
    }
    env = environment(os.environ, root=_ROOT, cudnn=None) | {
        "CUDA_VISIBLE_DEVICES": "",
        VARIABLE: settings.windows.variable(str(folder / METRICS)),
        **variable(configuration.fast_path),
    }
    words = [sys.executable, "-m", "megatron_cg.tools.bench.measure.tape_measured"]
    return Run(run.name, [*words, json.dumps(plan), str(folder / "record")], env, folder)


def check_for_tape(run: PlannedRun) -> None:
    """Raises BenchError or LaunchError for what the CPU's training loop does not support."""
    settings, configuration = run.settings, KNOWN[run.configuration]
    shape = tape_shape(settings.preset)
    own = configuration.fsdp and configuration.graphs != "full"
    asked = {
        f"the configuration {run.configuration}": not own,
        f"{settings.microbatches} microbatches": settings.microbatches != 1,
        f"{settings.layers} layers": settings.layers not in (None, shape.layers),
        f"grouped GEMM {settings.grouped_gemm}": settings.grouped_gemm != DEFAULT,
        "a profile of a GPU": settings.windows.profiled > 0,
        " ".join(settings.extra): bool(settings.extra),
    }
    refused = [what for what, is_asked in asked.items() if is_asked]
    if refused:
        raise BenchError(
            f"the tape has its own training loop, which does not support {', '.join(refused)}: "
            "leave that out, or give --backend transformer_engine on a machine with GPUs."
        )
