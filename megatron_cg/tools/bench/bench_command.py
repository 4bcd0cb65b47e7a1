"""Runs one call of ``megatron-cg bench``, from its arguments to results on disk."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from megatron_cg.arguments.schema import TAPE, TRANSFORMER_ENGINE
from megatron_cg.files import write_text
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.run import gpu_count
from megatron_cg.tools.align.tape import TAPE_NOTICE, tape_shape
from megatron_cg.tools.align.token_data import TokenStream, existing, from_text, python_sources
from megatron_cg.tools.bench import INCOMPLETE
from megatron_cg.tools.bench.measure.sampling import PROGRAM
from megatron_cg.tools.bench.measure.windows import Windows
from megatron_cg.tools.bench.results.bench_page import write_page
from megatron_cg.tools.bench.results.comparing import compare
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.scaling import trends
from megatron_cg.tools.bench.results.summary import print_summary
from megatron_cg.tools.bench.runs.bench_machine import machine
from megatron_cg.tools.bench.runs.bench_schedule import (
    PlannedRun,
    Scale,
    ScheduleError,
    ablated,
    schedule,
)
from megatron_cg.tools.bench.runs.commands import DEFAULT, Settings
from megatron_cg.tools.bench.runs.configurations import EAGER, GRAPHS
from megatron_cg.tools.bench.runs.execute import Options, Start, execute
from megatron_cg.tools.bench.runs.shapes import SHAPES
from megatron_cg.tools.bench.runs.starting import check_for_tape, on_gpus, on_tape, refused_on_gpus
from megatron_cg.tools.bench.runs.store import (
    OK,
    Result,
    ResultError,
    keep,
    kept,
    newest,
    read,
    write_all,
)

TAPE_SHAPES = ("qwen3-moe-tiny",)
REPORT = "bench.md"
NO_PLOTS = (
    "megatron-cg bench: no plots without matplotlib: pip install matplotlib, then draw what was "
    "measured with megatron-cg bench --report and the same --out."
)


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Do what the arguments say; returns the exit code."""
    earlier = read(args.compare) if args.compare else []
    results: list[Result] = []
    if not args.report:
        backend = _backend(args.backend)
        runs = planned(args, backend, extra)
        if args.dry_run:
            _print_plan(args, backend, runs)
            return 0
        try:
            results = _execute(args, backend, runs)
        except (KeyboardInterrupt, SystemExit):
            if not kept(args.out):
                raise
            again = f"megatron-cg bench --report --out {shlex.quote(str(args.out))}"
            print(f"stopped; what was measured until then is shown by: {again}", file=sys.stderr)
            raise
    _report(args.out, results, earlier)
    return 0 if all(result["status"] == OK for result in results) else INCOMPLETE


def _backend(chosen: str) -> str:
    if chosen != "auto":
        return chosen
    return TRANSFORMER_ENGINE if gpu_count() else TAPE


def planned(args: argparse.Namespace, backend: str, extra: Sequence[str]) -> list[PlannedRun]:
    """The requested runs. Raises ScheduleError and PresetError."""
    scale = Scale.parse(args.scale) if args.scale else None
    on_cpu = backend == TAPE
    windows = _windows(args, scaling=scale is not None, on_cpu=on_cpu)
    only = _only(args, on_cpu=on_cpu)
    base = []
    for name in args.shapes or (TAPE_SHAPES if on_cpu else SHAPES):
        preset = load_preset(name)
        settings = Settings(
            preset,
            args.nproc or preset.nproc,
            args.microbatches or (1 if on_cpu else 2),
            args.layers,
            None if args.scopes is None else tuple(args.scopes),
            DEFAULT,
            windows,
            args.check_for_nan,
            args.rope_fusion,
            tuple(extra),
        )
        base.append(_in_small(settings) if on_cpu else settings)
    runs = schedule(base, args.grouped_gemm, only, scale, args.rounds)
    if on_cpu:
        for run in runs:
            check_for_tape(run)
    return runs


def _only(args: argparse.Namespace, *, on_cpu: bool) -> list[str] | None:
    """The names of the configurations to run; None for the usual ones."""
    if args.ablate_fast_path is not None:
        if args.only or args.scale:
            raise ScheduleError(
                "--ablate-fast-path chooses the configurations itself, at one size: leave out "
                "--only and --scale."
            )
        return ablated(args.ablate_fast_path)
    if args.only:
        return list(args.only.split(","))
    return [EAGER, GRAPHS] if on_cpu else None


def _in_small(settings: Settings) -> Settings:
    """The settings with the preset's small shape, which the tape trains."""
    shape = tape_shape(settings.preset)
    return replace(
        settings,
        layers=settings.layers or shape.layers,
        scopes=shape.scopes if settings.scopes is None else settings.scopes,
    )


def _windows(args: argparse.Namespace, *, scaling: bool, on_cpu: bool) -> Windows:
    def chosen(given: int | None, default: int) -> int:
        return (0 if scaling else default) if given is None else given

    return Windows(
        warmup=args.warmup_steps,
        settle=args.settle_steps,
        timed=args.timed_steps,
        probed=chosen(args.probe_steps, 4),
        sampled=args.sample_steps if args.sample or args.sample_native else 0,
        native=args.sample_native,
        profiled=chosen(
            args.profile_steps, 0 if on_cpu or args.ablate_fast_path is not None else 2
        ),
    )


def _start(backend: str, data: TokenStream) -> Start:
    return on_tape(data) if backend == TAPE else on_gpus(data)


def _print_plan(args: argparse.Namespace, backend: str, runs: Sequence[PlannedRun]) -> None:
    """Print the planned runs as shell commands, with an estimate of the time."""
    work = _work(args)
    start = _start(backend, TokenStream(work / "data" / "text", "", is_bytes=True))
    total = 0.0
    for run in runs:
        total += run.seconds()
        process = start(run, work / run.name)
        own = process.env.items() - os.environ.items()
        print(f"# {run.name}: about {run.seconds():.0f} s")
        print(*(f"{name}={shlex.quote(value)}" for name, value in sorted(own)), end=" ")
        print(f"{shlex.join(process.words)}\n")
    rounds = f" in {args.rounds} rounds" if args.rounds > 1 else ""
    print(
        f"# {len(runs)} runs{rounds}, about {total:.0f} s together, of which starting is the most."
    )


def _execute(args: argparse.Namespace, backend: str, runs: Sequence[PlannedRun]) -> list[Result]:
    if (args.sample or args.sample_native) and shutil.which(PROGRAM) is None:
        raise ScheduleError(
            f"--sample needs {PROGRAM}, which is not installed: pip install 'megatron-cg[bench]'."
        )
    work = _work(args)
    facts: dict[str, Any] = {"machine": machine(), "backend": backend}
    facts["notice"] = TAPE_NOTICE if backend == TAPE else ""
    refused = refused_on_gpus if backend != TAPE else (lambda _run: "")
    start = _start(backend, _data(args, work / "data"))
    options = Options(
        work=work,
        invocation=f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}",
        timeout=args.timeout,
        budget=args.budget_seconds,
        keep_traces=args.keep_traces,
        samples=args.out / "samples",
    )

    def finished(result: Result) -> None:
        keep(result, args.out)
        if result["error"]:
            print(f"  {result['status']}: {result['error']}", file=sys.stderr, flush=True)

    return execute(runs, start, options, facts, finished=finished, refused=refused)


def _work(args: argparse.Namespace) -> Path:
    work: Path = args.work_dir or args.out / "work"
    return work.resolve()


def _data(args: argparse.Namespace, folder: Path) -> TokenStream:
    if args.data_path:
        return existing(args.data_path)
    prefix = folder / "text"
    if all(prefix.with_suffix(suffix).is_file() for suffix in (".bin", ".idx")):
        return TokenStream(prefix, "text of an earlier call", is_bytes=True)
    return from_text(python_sources(), folder, "the sources of Python's own library")


def _report(out: Path, made: Sequence[Result], earlier: Sequence[Result]) -> None:
    """Write all results in ``out``; print the tables of the new results, or of all."""
    everything = newest([*kept(out), *made])
    if not everything:
        raise ResultError(f"--report: {out} holds no results; --out is where bench wrote them.")
    changes = compare(earlier, everything) if earlier else []
    lines = trends(everything)
    write_all(everything, out)
    write_text(out / REPORT, as_markdown(everything, lines, changes))
    text = as_markdown(list(made) or everything, lines, changes)
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)
    print(f"written: {out / 'bench.json'} and {out / REPORT}")
    print(f"written: {write_page(everything, lines, out)}")
    if importlib.util.find_spec("matplotlib") is None:
        print(NO_PLOTS, file=sys.stderr)
    else:
        from megatron_cg.tools.bench.results.bench_plots import write_pngs

        files = write_pngs(everything, lines, out)
        print(f"drawn: {', '.join(map(str, files)) or 'nothing yet'}")
    print_summary(list(made) or everything, Console())
