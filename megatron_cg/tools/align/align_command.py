"""Runs one call of ``megatron-cg align``, from its arguments to the result."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.align.align_tables import print_report
from megatron_cg.tools.align.command import Plan, by_run
from megatron_cg.tools.align.compare import DIFFERENT, FAILED, IDENTICAL, NOT_COMPARABLE, Outcome
from megatron_cg.tools.align.presets import Preset, load_preset
from megatron_cg.tools.align.processes import LaunchError, Options, check_start
from megatron_cg.tools.align.run import align_on_gpus, check_gpus, example_script, gpu_count
from megatron_cg.tools.align.tape import TAPE_NOTICE, align_on_tape, describe, tape_plan
from megatron_cg.tools.align.token_data import TokenStream, existing, from_text, python_sources

EXIT_CODES = {IDENTICAL: 0, DIFFERENT: 1, NOT_COMPARABLE: 2, FAILED: 3}
Align = Callable[[TokenStream], Outcome]


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Run the alignment; print the table, return the exit code."""
    preset = load_preset(args.preset)
    backend = args.backend
    if backend == "auto":
        backend = TRANSFORMER_ENGINE if gpu_count() else TAPE
    with tempfile.TemporaryDirectory(prefix="megatron-cg-align-") as temporary:
        directory = (args.work_dir or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        options = Options(directory, timeout=args.timeout, eager_record=args.eager_record)
        prepare = _on_tape if backend == TAPE else _on_gpus
        align = prepare(args, preset, options, extra)
        if args.data_path:
            data = existing(args.data_path)
        else:
            text = "the sources of Python's own library"
            data = from_text(python_sources(), directory / "data", text)
        print(f"preset {preset.name}: {preset.description}")
        print(f"data: {data.description}", flush=True)
        outcome = align(data)
    notice = TAPE_NOTICE if backend == TAPE else ""
    print_report(Console(emoji=False), f"{preset.name} on {backend}", outcome, notice)
    if args.work_dir is not None and outcome.graphed is not None:
        print(f"a page of it: megatron-cg report {shlex.quote(str(args.work_dir))}")
    return EXIT_CODES[outcome.comparison.status]


def _on_gpus(args: Any, preset: Preset, options: Options, extra: Sequence[str]) -> Align:
    """Check both runs of a Megatron script. Raises LaunchError."""
    both, of_graphs = by_run(extra)
    gemm = () if args.cg_grouped_gemm == "te" else ("--cg-grouped-gemm", args.cg_grouped_gemm)
    backend = ("--cg-backend", NATIVE) if args.backend == NATIVE else ()
    plan = Plan(
        script=(args.script or example_script()).resolve(),
        nproc=args.nproc or max(1, min(preset.nproc, gpu_count())),
        model=tuple(preset.arguments()),
        steps=args.steps,
        scopes=preset.scopes if args.scopes is None else tuple(args.scopes),
        warmup_steps=args.warmup_steps,
        graph_extra=(*gemm, *backend, *of_graphs),
        extra=both,
    )
    check_gpus(plan, options)
    return partial(align_on_gpus, plan, options=options)


def _on_tape(args: Any, preset: Preset, options: Options, extra: Sequence[str]) -> Align:
    """Check both runs on the CPU. Raises LaunchError."""
    what = " ".join([*(["--script", str(args.script)] if args.script else []), *extra])
    if what:
        raise LaunchError(
            f"the tape has a training loop of its own and cannot take {what}: leave it out, or "
            f"give --backend {TRANSFORMER_ENGINE} on a machine with GPUs."
        )
    processes = args.nproc or preset.nproc
    plan = tape_plan(
        preset,
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        scopes=None if args.scopes is None else tuple(args.scopes),
        torch_gemm=args.cg_grouped_gemm == "torch",
    )
    check_start(options, processes)
    print(describe(plan.model, processes), flush=True)
    return partial(align_on_tape, plan, processes, options=options)
