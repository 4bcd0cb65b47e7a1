"""The two runs on the CPU: real Megatron-FSDP over gloo, a tape instead of the CUDA graph.

``python -m megatron_cg.tools.align.tape PLAN PROCESSES DIRECTORY`` makes one of them; PLAN is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from megatron_cg.tools.align.compare import Outcome
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.align.processes import (
    NO_DROPLESS,
    LaunchError,
    Options,
    Run,
    run_and_compare,
)
from megatron_cg.tools.align.run import environment
from megatron_cg.tools.align.token_data import TokenStream
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

TAPE_NOTICE = "CPU tape: a recording of ATen operations replaces the CUDA graph"

_ROOT = Path(__file__).resolve().parents[3]


def tape_plan(
    preset: Preset,
    *,
    steps: int,
    warmup_steps: int,
    scopes: tuple[str, ...] | None = None,
    torch_gemm: bool = False,
) -> TrainingPlan:
    """The run with tapes; the eager one follows from it.

    ``scopes`` are the preset's if None. With ``torch_gemm`` the experts of both runs are Megatron's
    grouped ones, and those in tapes compute by torch's grouped GEMM. Raises LaunchError if a CPU
    has no such run.
    """
    if preset.tape is None:
        raise LaunchError(
            f"preset {preset.name} cannot be built on a CPU ({preset.description}) Give another "
            "--preset, or run on GPUs."
        )
    model = CpuModelConfig(**preset.tape)
    scopes = tuple(model.graph_modules if scopes is None else scopes)
    wants_experts = torch_gemm or any("moe" in scope for scope in scopes)
    if "mamba" in scopes or (wants_experts and not model.experts):
        lacking = "Mamba layers" if "mamba" in scopes else "experts"
        raise LaunchError(
            f"the small model of {preset.name} has no {lacking}: leave out --scopes and "
            "--cg-grouped-gemm, or give another --preset."
        )
    if "moe" in scopes and not torch_gemm:
        raise LaunchError(NO_DROPLESS)
    if warmup_steps >= steps:
        raise LaunchError(f"--steps {steps} leaves no step after --warmup-steps {warmup_steps}.")
    model = replace(model, grouped=torch_gemm, graph_modules=scopes)
    return TrainingPlan(model, steps, warmup_steps, graphs=True, device_counts=torch_gemm)


def describe(model: CpuModelConfig, processes: int) -> str:
    """Describes the model that is trained instead of the preset's, and warns of a long wait."""
    experts = f", {model.experts} experts, top-{model.topk}" if model.experts else ""
    text = (
        f"{TAPE_NOTICE}; the model is a small copy of the preset's shape: {model.layers} layers, "
        f"hidden {model.hidden_size}, {model.heads} heads{experts}, sequences of "
        f"{model.sequence_length}, plain attention"
    )
    cores = len(os.sched_getaffinity(0))
    if processes > cores:
        text += (
            f"\nwarning: {processes} processes share {cores} cores, so each step takes about "
            f"{processes / cores:.0f} times as long: give a smaller --nproc"
        )
    return text


def align_on_tape(
    plan: TrainingPlan, processes: int, data: TokenStream, options: Options
) -> Outcome:
    """Train eagerly, train with tapes as ``plan`` says, compare."""
    env = environment(os.environ, root=_ROOT, cudnn=None)
    # Uses no GPU, even if there is one.
    env["CUDA_VISIBLE_DEVICES"] = ""
    plan = replace(plan, tokens=data.prefix)
    plans = {"graphs": plan, "eager": replace(plan, graphs=False, device_counts=False)}
    if plan.device_counts:
        # Megatron refuses dropless experts in a graph, also in the config of an eager run.
        model = replace(plan.model, graph_modules=("attn",))
        plans["eager"] = replace(plans["eager"], model=model)
    runs = []
    for name in options.names:
        directory = options.directory / name
        words = [sys.executable, "-m", "megatron_cg.tools.align.tape"]
        words += [json.dumps(asdict(plans[name]), default=str), str(processes)]
        words.append(str(directory / "record"))
        runs.append(Run(name, words, env, directory))
    return run_and_compare(runs, options)


def main(text: str, processes: str, directory: str) -> None:
    """Train according to the plan, in processes connected by gloo; each writes its record.

    The processes are forked from this one, which imports Megatron for all of them. That saves 5 s
    of CPU time per process. An import starts no thread of torch or gloo.
    """
    # If Transformer Engine is installed, Megatron would build its layers from kernels that a CPU
    # lacks. None makes its import fail (docs.python.org, "The module cache").
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    import megatron_cg.tools.cpu.train  # noqa: F401
    from megatron_cg.tools.cpu import launch
    from megatron_cg.upstream.patch import set_attribute, undone_after

    fields = json.loads(text)
    model, tokens = CpuModelConfig(**fields.pop("model")), Path(fields.pop("tokens"))
    plan = TrainingPlan(model, tokens=tokens, **fields)
    with undone_after(set_attribute(launch, "START", "fork")):
        launch.run_plans([(plan, Path(directory))], int(processes))


if __name__ == "__main__":
    main(*sys.argv[1:])
