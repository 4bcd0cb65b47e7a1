"""Runs one call of ``megatron-cg align``, from its arguments to the table of the result."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

from packaging.version import Version

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.align import run
from megatron_cg.tools.align.presets import Preset, load_preset
from megatron_cg.tools.launch_line import read_flags
from megatron_cg.tools.record.compare import EXIT_CODES, Comparison, Outcome, compare, read_run
from megatron_cg.upstream.symbols import installed_version

_SHOWN_SHARDS = 5
_NOTICE = "CPU tape: a recording of ATen operations replaces the CUDA graph"


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        comparison = _compared(args, extra)
    if args.json:
        print(json.dumps(asdict(comparison)))
    return EXIT_CODES[comparison.status]


def _compared(args: argparse.Namespace, extra: Sequence[str]) -> Comparison:
    if args.records is not None:
        if extra:
            raise MegatronCGError(f"--records trains nothing: leave out {' '.join(extra)}.")
        outcome = Outcome(compare(*map(read_run, args.records)))
        print_report("two records", outcome)
        return outcome.comparison
    core = installed_version("megatron-core")
    if args.megatron_fsdp_version == 2 and core and Version(core) < Version("0.20.dev0"):
        raise MegatronCGError(
            f"--megatron-fsdp-version 2 needs megatron-core 0.20, and here is {core}: leave it "
            "out, or put a clone of Megatron-LM's main first on PYTHONPATH."
        )
    preset = load_preset(args.preset)
    backend = args.backend
    if backend == "auto":
        backend = TRANSFORMER_ENGINE if run.gpu_count() else TAPE
    with tempfile.TemporaryDirectory(prefix="megatron-cg-align-") as temporary:
        directory = (args.work_dir or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        run.check_start(directory)
        made = _on_tape if backend == TAPE else _on_gpus
        runs = made(args, preset, extra, directory)
        print(f"preset {preset.name}: {preset.description}", flush=True)
        outcome = run.run_and_compare(runs, args.timeout)
    notice = _NOTICE if backend == TAPE else ""
    print_report(f"{preset.name} on {backend}", outcome, notice)
    return outcome.comparison


def _on_gpus(
    args: argparse.Namespace, preset: Preset, extra: Sequence[str], directory: Path
) -> list[run.Run]:
    both: list[str] = []
    of_graphs = ["--cg-backend", NATIVE] if args.backend == NATIVE else []
    for flag in read_flags(extra):
        (of_graphs if flag.name in run.ABOUT_GRAPHS else both).extend(flag.words)
    plan = run.Plan(
        script=(args.script or run.example_script()).resolve(),
        nproc=args.nproc or max(1, min(preset.nproc, run.gpu_count())),
        model=tuple(preset.arguments()),
        steps=args.steps,
        scopes=preset.scopes if args.scopes is None else tuple(args.scopes),
        warmup_steps=args.warmup_steps,
        fsdp_version=args.megatron_fsdp_version,
        graph_extra=tuple(of_graphs),
        extra=tuple(both),
    )
    run.check_gpus(plan)
    data = run.python_text(directory / "data")
    return [run.make_run(plan, data, directory, name) for name in (run.EAGER, run.GRAPHS)]


def _on_tape(
    args: argparse.Namespace, preset: Preset, extra: Sequence[str], directory: Path
) -> list[run.Run]:
    """Runs of ``tape_run.py``, of a small copy of the preset's shape."""
    from megatron_cg.tape.training_plan import CpuModelConfig, TrainingPlan

    given = ["--script", str(args.script)] if args.script else []
    if given or extra:
        raise MegatronCGError(
            f"the tape has a training loop of its own and cannot take {' '.join([*given, *extra])}"
            f": leave it out, or give --backend {TRANSFORMER_ENGINE} on a machine with GPUs."
        )
    if preset.tape is None:
        raise MegatronCGError(
            f"preset {preset.name} cannot be built on a CPU ({preset.description}) Give another "
            "--preset, or run on GPUs."
        )
    model = CpuModelConfig(**preset.tape)
    scopes = model.graph_modules if args.scopes is None else args.scopes
    of_experts = ("moe_router", "moe_preprocess")
    lacking = ("mamba", "moe") if model.experts else ("mamba", "moe", *of_experts)
    if missing := [scope for scope in scopes if scope in lacking]:
        raise MegatronCGError(
            f"on the CPU, {preset.name} has no {' and '.join(missing)} to capture: give other "
            "--scopes, or none of them, or another --preset, or run on GPUs."
        )
    if (version := args.megatron_fsdp_version) != 1:  # megatron-core 0.19.2 knows no other
        model = replace(model, fsdp_options={"megatron_fsdp_version": version})
    model, processes = replace(model, graph_modules=tuple(scopes)), args.nproc or preset.nproc
    print(
        f"{_NOTICE}; the model is a small copy of the preset's shape: {model.layers} layers, "
        f"hidden {model.hidden_size}, {model.experts} experts, plain attention"
    )
    env = run.environment(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}  # No GPU, even if there is one
    words = [sys.executable, "-P", "-m", "megatron_cg.tools.align.tape_run"]
    runs = []
    for name in (run.EAGER, run.GRAPHS):
        plan = TrainingPlan(model, args.steps, args.warmup_steps, graphs=name == run.GRAPHS)
        place = directory / name
        more = [json.dumps(asdict(plan)), str(processes), str(place / "record")]
        runs.append(run.Run(name, [*words, *more], env, place))
    return runs


def print_report(title: str, outcome: Outcome, notice: str = "") -> None:
    from megatron_cg.telemetry import counts_text  # It imports torch.

    comparison, different = outcome.comparison, outcome.comparison.different_shards
    if outcome.log_tail:
        print(f"From its log\n{outcome.log_tail}")
    if comparison.values:
        print(f"{title}\n{run.table([*_rows(comparison)])}")
    if comparison.shards:
        print(f"parameter shards, all ranks: {comparison.shards}, different: {len(different)}")
        print(*(f"  differs: {name}\n" for name in different[:_SHOWN_SHARDS]), sep="", end="")
    if comparison.graphs:
        print(f"graphs, all ranks: {counts_text(comparison.graphs)}")
    reason = f": {comparison.reason}" if comparison.reason else ", to the last bit"
    print(f"{comparison.status.upper()}{reason}{f' ({notice})' if notice else ''}")


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    yield ["step", "what", "eager", "with graphs", "difference", "bits"]
    for value in comparison.values:
        if value.rank == 0 or not value.same:
            name = value.name if value.rank == 0 else f"{value.name} (rank {value.rank})"
            both = (value.eager, value.graphed)
            numbers = ["absent" if n is None else f"{float.fromhex(n):.9g}" for n in both]
            result = ("0", "same") if value.same else (f"{value.difference:.3e}", "differ")
            yield [str(value.step), name, *numbers, *result]
