"""The two runs on the CPU: real Megatron-FSDP over gloo, a tape instead of the CUDA graph.

``python -m megatron_cg.tools.align.tape PLAN PROCESSES DIRECTORY`` makes one of them; PLAN is JSON.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megatron_cg.errors import MegatronCGError
from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan
from megatron_cg.tools.align.presets import Preset
from megatron_cg.tools.align.run import GRAPHS, TAPE_NOTICE, Run, environment

_GPU_ONLY = ("mamba", "moe")
_OF_EXPERTS = ("moe_router", "moe_preprocess")


def tape_plan(preset: Preset, args: Namespace) -> TrainingPlan:
    """The run with tapes. Raises MegatronCGError if a CPU has no such run."""
    if preset.tape is None:
        raise MegatronCGError(
            f"preset {preset.name} cannot be built on a CPU ({preset.description}) Give another "
            "--preset, or run on GPUs."
        )
    model = CpuModelConfig(**preset.tape)
    scopes: Sequence[str] = model.graph_modules if args.scopes is None else args.scopes
    missing = [scope for scope in scopes if scope in _GPU_ONLY]
    if not model.experts:
        missing += [scope for scope in scopes if scope in _OF_EXPERTS]
    if missing:
        raise MegatronCGError(
            f"on the CPU, {preset.name} has no {' and '.join(missing)} to capture: give other "
            "--scopes, or none of them, or another --preset, or run on GPUs."
        )
    if (version := args.megatron_fsdp_version) != 1:  # megatron-core 0.19.2 knows no other
        model = replace(model, fsdp_options={"megatron_fsdp_version": version})
    model = replace(model, graph_modules=tuple(scopes))
    return TrainingPlan(model, args.steps, args.warmup_steps, True)


def describe(model: CpuModelConfig, processes: int) -> str:
    """Describes the model that is trained instead of the preset's, and warns of a long wait."""
    cores = len(os.sched_getaffinity(0))
    wait = f"\nwarning: {processes} processes share {cores} cores: give a smaller --nproc"
    experts = f", {model.experts} experts, top-{model.topk}" if model.experts else ""
    return (
        f"{TAPE_NOTICE}; the model is a small copy of the preset's shape: {model.layers} layers, "
        f"hidden {model.hidden_size}, {model.heads} heads{experts}, sequences of "
        f"{model.sequence_length}, plain attention{wait if processes > cores else ''}"
    )


def tape_run(plan: TrainingPlan, processes: int, data: Path, directory: Path, name: str) -> Run:
    # Uses no GPU, even if there is one.
    env = environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    directory /= name
    fields = asdict(replace(plan, tokens=data, graphs=name == GRAPHS))
    words = [sys.executable, "-P", "-m", "megatron_cg.tools.align.tape"]
    words += [json.dumps(fields, default=str), str(processes), str(directory / "record")]
    return Run(name, words, env, directory)


def main(text: str, processes: str, directory: str) -> None:
    """Train according to the plan, in processes connected by gloo; each writes its record.

    The processes are forked from this one, which imports Megatron for all of them. That saves 5 s
    of CPU time per process. An import starts no thread of torch or gloo.
    """
    # If Transformer Engine is installed, Megatron would build its layers from kernels that a CPU
    # lacks. None makes its import fail (docs.python.org, "The module cache").
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    from megatron_cg.tape import launch
    from megatron_cg.tools.align.tape_run import train

    fields = json.loads(text)
    model, tokens = CpuModelConfig(**fields.pop("model")), Path(fields.pop("tokens"))
    plan = TrainingPlan(model, tokens=tokens, **fields)
    launch.START = "fork"
    launch.run_processes(partial(train, plan, Path(directory)), int(processes))


if __name__ == "__main__":
    main(*sys.argv[1:])
