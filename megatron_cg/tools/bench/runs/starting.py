"""Makes the process of one run: under torchrun on GPUs, or on the CPU with the tape."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_cg.tools.align.command import (
    BASE_FLAGS,
    DETERMINISTIC_ENVIRONMENT,
    by_run,
    environment,
)
from megatron_cg.tools.align.processes import Run
from megatron_cg.tools.align.run import gpu_count, torch_cudnn
from megatron_cg.tools.align.tape import tape_shape
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.measure.eager_fast_path import variable
from megatron_cg.tools.bench.measure.windows import VARIABLE
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun
from megatron_cg.tools.bench.runs.configurations import KNOWN
from megatron_cg.tools.bench.runs.settings import CUTLASS, DEFAULT, Settings
from megatron_cg.tools.bench.runs.shapes import is_hybrid, is_moe

SCRIPT = Path(__file__).resolve().parents[1] / "measure" / "measured.py"
CUTLASS_VARIABLE = "NVTE_USE_CUTLASS_GROUPED_GEMM"
"""transformer-engine 2.20.2: grouped GEMMs of experts use CUTLASS on Hopper, else cuBLAS."""
_FSDP_ONLY = frozenset(
    {
        *("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"),
        *("--ckpt-format", "fsdp_dtensor"),
    }
)
"""Words of BASE_FLAGS that DDP does not use."""
_ROOT = Path(__file__).resolve().parents[4]
METRICS = "metrics"
"""The folder of the ranks' metrics, inside the run's folder."""


def on_gpus(data: TokenStream, run: PlannedRun, folder: Path) -> Run:
    """A run of the example script under torchrun; all runs share one sample index."""
    settings, configuration = run.settings, KNOWN[run.configuration]
    flags = data.flags(data.prefix.parent / "cache")
    words = command(settings, run.configuration, flags, folder / "artifacts")
    env = run_environment(
        settings, os.environ, root=_ROOT, cudnn=torch_cudnn(), metrics=folder / METRICS
    )
    if configuration.graphs == "none":
        env |= variable(configuration.parts)
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
        **variable(configuration.parts),
    }
    words = [sys.executable, "-m", "megatron_cg.tools.bench.measure.tape_measured"]
    return Run(run.name, [*words, json.dumps(plan), str(folder / "record")], env, folder)


def check_for_tape(run: PlannedRun) -> None:
    """Raises BenchError or LaunchError for what the CPU's training loop does not support."""
    settings, configuration = run.settings, KNOWN[run.configuration]
    shape = tape_shape(settings.preset)
    own = configuration.fsdp and configuration.graphs != "full" and not configuration.local
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
            f"the tape has a training loop of its own, without {', '.join(refused)}: leave that "
            "out, or give --backend transformer_engine on a machine with GPUs."
        )


def command(
    settings: Settings, configuration: str, data: Sequence[str], artifacts: Path = Path("artifacts")
) -> list[str]:
    """The whole command line; layers that it compiles first go to the folder ``artifacts``."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(settings.nproc), "-m", "megatron_cg", str(SCRIPT)]
    words += script_words(settings, configuration, data)
    if not KNOWN[configuration].compiled:
        return words
    first = [sys.executable, "-m", "megatron_cg.tools.bench.runs.compiled_first"]
    return [*first, *words, "--cg-precompile-dir", str(artifacts)]


def script_words(settings: Settings, configuration: str, data: Sequence[str]) -> list[str]:
    """The script's own arguments, all of them Megatron's or this package's.

    As in a production run, ``--deterministic-mode`` is not among them. The check for NaN is off by
    default: it makes DDP wait for the GPU at each bucket, but does not check Megatron-FSDP's
    sharded gradients.
    """
    one, preset = KNOWN[configuration], settings.preset
    left_out = {"--deterministic-mode"} | (set() if one.fsdp else _FSDP_ONLY)
    left_out |= {"--no-rope-fusion"} if settings.rope_fusion else set()
    words = [*settings.model.arguments(), *(word for word in BASE_FLAGS if word not in left_out)]
    # So large that no step includes the time of a log line.
    words += ["--manual-gc", "--log-interval", "1000"]
    words += [] if settings.check_for_nan else ["--no-check-for-nan-in-loss-and-grad"]
    words += [*data, "--train-iters", str(settings.windows.steps)]
    batch = int(str(preset.flags["micro-batch-size"])) * settings.microbatches * settings.nproc
    words += ["--global-batch-size", str(batch)]
    if is_moe(preset) and settings.nproc % 2 == 0:  # Pairs of GPUs share a model's experts.
        words += ["--expert-model-parallel-size", "2"]
    words += one.words(settings.chosen_scopes, settings.windows.warmup)
    both, of_graphs = by_run(settings.extra)
    return [*words, *both, *(of_graphs if one.fsdp and one.graphs == "partial" else ())]


def run_environment(
    settings: Settings,
    inherited: Mapping[str, str],
    *,
    root: Path,
    cudnn: Path | None,
    metrics: Path,
) -> dict[str, str]:
    """The environment of a run that writes its metrics to ``metrics``.

    The variables of determinism are as the user set them.
    """
    env = environment(inherited, root=root, cudnn=cudnn)
    for name in (*DETERMINISTIC_ENVIRONMENT, CUTLASS_VARIABLE):
        env.pop(name, None)
    env |= {name: inherited[name] for name in DETERMINISTIC_ENVIRONMENT.keys() & inherited.keys()}
    if settings.grouped_gemm == CUTLASS:
        env[CUTLASS_VARIABLE] = "1"
    return env | {VARIABLE: settings.windows.variable(str(metrics))}
