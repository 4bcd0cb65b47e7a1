"""The two runs on the CPU: real Megatron-FSDP over gloo, a tape instead of the CUDA graph."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from megatron_cg.tools.align import command
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.presets import Preset, TapeShape
from megatron_cg.tools.align.processes import (
    LaunchError,
    Options,
    Run,
    check_start,
    run_and_compare,
)
from megatron_cg.tools.align.token_data import TokenStream

TAPE_NOTICE = "CPU tape: a recording of ATen operations replaces the CUDA graph"

_ROOT = Path(__file__).resolve().parents[3]


def tape_shape(preset: Preset) -> TapeShape:
    """The preset's small shape. Raises LaunchError if it has none."""
    if preset.tape is None:
        raise LaunchError(
            f"preset {preset.name} cannot be built on a CPU ({preset.description}) Give another "
            "--preset, or run on GPUs."
        )
    return preset.tape


def describe(shape: TapeShape) -> str:
    """Describes the model that is trained instead of the preset's."""
    experts = f", {shape.experts} experts, top-{shape.topk}" if shape.experts else ""
    return (
        f"{TAPE_NOTICE}; the model is a small copy of the preset's shape: {shape.layers} layers, "
        f"hidden {shape.hidden}, {shape.heads} heads{experts}, sequences of {shape.seq}, plain "
        "attention"
    )


def check_tape(
    preset: Preset, options: Options, *, steps: int, warmup_steps: int, nproc: int
) -> None:
    """Raise LaunchError, before anything is created, if runs cannot be made or compared."""
    tape_shape(preset)
    if options.mutation is not None:
        raise LaunchError("--mutate is for a script that reads it, and the tape runs no script.")
    if warmup_steps >= steps:
        raise LaunchError(f"--steps {steps} leaves no step after --warmup-steps {warmup_steps}.")
    check_start(options, nproc)


def align_on_tape(
    preset: Preset,
    data: TokenStream,
    options: Options,
    *,
    steps: int,
    warmup_steps: int,
    scopes: tuple[str, ...] | None,
    nproc: int,
    bf16: bool = True,
    grouped_gemm: str = "te",
) -> Outcome:
    """Train eagerly, train with tapes after ``warmup_steps``, compare.

    ``grouped_gemm="torch"`` is for the run with tapes; experts of both runs are Megatron's grouped
    ones then.

    Raises LaunchError for options that only the GPU path has, and for a preset without a small
    shape.
    """
    check_tape(preset, options, steps=steps, warmup_steps=warmup_steps, nproc=nproc)
    shape = tape_shape(preset)
    plan = {
        "shape": asdict(shape) | {"scopes": list(shape.scopes if scopes is None else scopes)},
        "steps": steps,
        "warmup_steps": warmup_steps,
        "processes": nproc,
        "bf16": bf16,
        "grouped_gemm": grouped_gemm,
        "tokens": str(data.prefix),
    }
    env = command.environment(os.environ, root=_ROOT, cudnn=None)
    # Uses no GPU, even if there is one.
    env["CUDA_VISIBLE_DEVICES"] = ""
    runs = []
    for name in options.names:
        directory = options.directory / name
        words = [sys.executable, "-m", "megatron_cg.tools.align.tape_worker"]
        words += [json.dumps(plan | {"graphs": name == "graphs"}), str(directory / "record")]
        runs.append(Run(name, words, env, directory))
    return run_and_compare(runs, options)
