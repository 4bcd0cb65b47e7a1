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
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from megatron_cg.arguments.schema import TAPE, TRANSFORMER_ENGINE
from megatron_cg.files import check_writable, write_text
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.run import gpu_count
from megatron_cg.tools.align.tape import TAPE_NOTICE, tape_shape
from megatron_cg.tools.align.token_data import TokenStream, existing, from_text, python_sources
from megatron_cg.tools.bench import INCOMPLETE, BenchError
from megatron_cg.tools.bench.measure.sampling import PROGRAM
from megatron_cg.tools.bench.measure.windows import Windows
from megatron_cg.tools.bench.results.bench_page import write_page
from megatron_cg.tools.bench.results.comparing import compare
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.scaling import trends
from megatron_cg.tools.bench.results.summary import print_summary
from megatron_cg.tools.bench.runs.bench_machine import machine
from megatron_cg.tools.bench.runs.bench_schedule import PlannedRun, parse_scale, schedule
from megatron_cg.tools.bench.runs.commands import Settings
from megatron_cg.tools.bench.runs.configurations import EAGER, GRAPHS
from megatron_cg.tools.bench.runs.execute import Options, Start, execute
from megatron_cg.tools.bench.runs.shapes import SHAPES
from megatron_cg.tools.bench.runs.starting import check_for_tape, on_gpus, on_tape, refused_on_gpus
from megatron_cg.tools.bench.runs.store import FILE, OK, Result, keep, kept, newest, read, write

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
        on_cpu = args.backend == TAPE or (args.backend == "auto" and not gpu_count())
        runs = _planned(args, extra, on_cpu=on_cpu)
        if args.dry_run:
            _print_plan(args, runs, on_cpu=on_cpu)
            return 0
        # Before the runs, which may take hours: old results that cannot be read, and the folder.
        kept(args.out)
        check_writable(args.out / FILE)
        try:
            results = _execute(args, runs, on_cpu=on_cpu)
        except (KeyboardInterrupt, SystemExit):
            if not kept(args.out):
                raise
            again = f"megatron-cg bench --report --out {shlex.quote(str(args.out))}"
            print(f"stopped; what was measured until then is shown by: {again}", file=sys.stderr)
            raise
    _report(args.out, results, earlier)
    return 0 if all(result["status"] == OK for result in results) else INCOMPLETE


def _planned(args: argparse.Namespace, extra: Sequence[str], *, on_cpu: bool) -> list[PlannedRun]:
    """The requested runs. Raises BenchError and PresetError."""
    base = []
    for name in dict.fromkeys(args.shapes or (TAPE_SHAPES if on_cpu else SHAPES)):
        preset = load_preset(name)
        layers, scopes = args.layers, args.scopes
        if on_cpu:  # The tape trains the preset's small shape.
            small = tape_shape(preset)
            layers = layers or small.layers
            scopes = small.scopes if scopes is None else scopes
        settings = Settings(
            preset,
            nproc=args.nproc or preset.nproc,
            microbatches=args.microbatches or (1 if on_cpu else 2),
            layers=layers,
            scopes=None if scopes is None else tuple(scopes),
            windows=_windows(args, on_cpu=on_cpu),
            check_for_nan=args.check_for_nan,
            rope_fusion=args.rope_fusion,
            extra=tuple(extra),
        )
        base.append(settings)
    scale = parse_scale(args.scale) if args.scale else None
    only = _only(args, on_cpu=on_cpu)
    runs = schedule(base, args.grouped_gemm, only, scale, args.rounds)
    for run in runs if on_cpu else ():
        check_for_tape(run)
    return runs


def _only(args: argparse.Namespace, *, on_cpu: bool) -> list[str] | None:
    """The names of the configurations to run; None for the usual ones."""
    if args.only:
        return list(args.only.split(","))
    return [EAGER, GRAPHS] if on_cpu else None


def _windows(args: argparse.Namespace, *, on_cpu: bool) -> Windows:
    no_trace = on_cpu or args.scale
    probed = 0 if args.scale else 4
    return Windows(
        warmup=args.warmup_steps,
        settle=args.settle_steps,
        timed=args.timed_steps,
        probed=probed if args.probe_steps is None else args.probe_steps,
        sampled=args.sample_steps if args.sample or args.sample_native else 0,
        native=args.sample_native,
        profiled=(0 if no_trace else 2) if args.profile_steps is None else args.profile_steps,
    )


def _print_plan(args: argparse.Namespace, runs: Sequence[PlannedRun], *, on_cpu: bool) -> None:
    """Print the planned runs as shell commands, with an estimate of the time."""
    work = _work(args)
    start = _start(TokenStream(work / "data" / "text", "", is_bytes=True), on_cpu=on_cpu)
    for run in runs:
        process = start(run, work / run.name)
        own = process.env.items() - os.environ.items()
        print(f"# {run.name}: about {run.seconds():.0f} s")
        print(*(f"{name}={shlex.quote(value)}" for name, value in sorted(own)), end=" ")
        print(f"{shlex.join(process.words)}\n")
    total = sum(run.seconds() for run in runs)
    rounds = f" in {args.rounds} rounds" if args.rounds > 1 else ""
    print(
        f"# {len(runs)} runs{rounds}, about {total:.0f} s together, of which starting is the most."
    )


def _execute(args: argparse.Namespace, runs: Sequence[PlannedRun], *, on_cpu: bool) -> list[Result]:
    if (args.sample or args.sample_native) and shutil.which(PROGRAM) is None:
        raise BenchError(
            f"--sample needs {PROGRAM}, which is not installed: pip install 'megatron-cg[bench]'."
        )
    work = _work(args)
    facts = {
        "machine": machine(),
        "backend": TAPE if on_cpu else TRANSFORMER_ENGINE,
        "notice": TAPE_NOTICE if on_cpu else "",
    }
    options = Options(
        work=work,
        invocation=f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}",
        timeout=args.timeout,
        budget=args.budget_seconds,
        keep_traces=args.keep_traces,
        samples=args.out / "samples",
    )
    start = _start(_data(args, work / "data"), on_cpu=on_cpu)
    refused = (lambda _run: "") if on_cpu else refused_on_gpus
    results = []
    for result in execute(runs, start, options, facts, refused):
        keep(result, args.out)
        if result["error"]:
            print(f"  {result['status']}: {result['error']}", file=sys.stderr, flush=True)
        results.append(result)
    return results


def _start(data: TokenStream, *, on_cpu: bool) -> Start:
    return partial(on_tape if on_cpu else on_gpus, data)


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
        raise BenchError(f"--report: {out} holds no results; --out is where bench wrote them.")
    changes = compare(earlier, everything) if earlier else []
    lines = trends(everything)
    write(everything, out / FILE)
    write_text(out / REPORT, as_markdown(everything, lines, changes))
    text = as_markdown(list(made) or everything, lines, changes)
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)
    print(f"written: {out / FILE} and {out / REPORT}")
    print(f"written: {write_page(everything, lines, out)}")
    if importlib.util.find_spec("matplotlib") is None:
        print(NO_PLOTS, file=sys.stderr)
    else:
        from megatron_cg.tools.bench.results.bench_plots import write_pngs

        files = write_pngs(everything, lines, out)
        print(f"drawn: {', '.join(map(str, files)) or 'nothing yet'}")
    print_summary(list(made) or everything, Console())
