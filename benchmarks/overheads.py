"""What guards and votes cost a step, and what graphs save, on this machine.

Trains a preset twice, eagerly and with graphs, as megatron-cg align does, and measures each rank's
steps after capture: guards before each replay, votes after each step, inputs copied into graphs.
Prints a table and writes overheads.json and overheads.md. Exit code 0: measured; 2: cannot be run
as asked, or a run failed. Arguments after a bare -- are Megatron's own, for both runs.

Without --deterministic GPUs train as they do in earnest: steps are shorter, and so shares larger.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.metrics import MetricsError, first_counted, metrics, step_times
from benchmarks.report import Measurement, as_markdown, print_table
from benchmarks.runs import TAPE, TRANSFORMER_ENGINE, Request, records
from megatron_cg.errors import MegatronCGError
from megatron_cg.files import write_text
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.presets import load_preset, preset_names
from megatron_cg.tools.align.run import gpu_count
from megatron_cg.tools.align.tape import TAPE_NOTICE
from megatron_cg.tools.align.token_data import from_text, python_sources
from megatron_cg.tools.bench.bench_machine import machine
from megatron_cg.tools.cli.numbers import positive, whole

FAILED = 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.overheads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    names = ", ".join(preset_names())
    add("--preset", default="qwen3-moe-tiny", metavar="NAME", help=f"model shape: {names}")
    backends = ("auto", TRANSFORMER_ENGINE, TAPE)
    add("--backend", choices=backends, default="auto", help="auto: the tape without a GPU")
    add("--nproc", type=positive, help="processes, one a GPU (default: the preset's)")
    add("--steps", type=positive, default=60, help="training steps of each run (default 60)")
    add("--warmup-steps", type=whole, default=3, help="eager steps first (default 3)")
    add("--settle", type=whole, default=10, help="steps after capture not counted (default 10)")
    add("--scopes", nargs="*", metavar="SCOPE", help="what to capture; none: whole layers")
    add("--deterministic", action="store_true", help="as runs are compared bit for bit")
    add("--out", type=Path, required=True, metavar="DIR", help="where the two files go")
    add("--work-dir", type=Path, metavar="DIR", help="keep data, logs and records here")
    add("--timeout", type=float, default=300.0, help="seconds that a run may take (default 300)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as asked; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:cut])
    try:
        _run(args, words[cut + 1 :])
    except MegatronCGError as error:
        print(f"benchmarks.overheads: {error}", file=sys.stderr)
        return FAILED
    return 0


def _run(args: argparse.Namespace, extra: Sequence[str]) -> None:
    backend = args.backend
    if backend == "auto":
        backend = TRANSFORMER_ENGINE if gpu_count() else TAPE
    preset = load_preset(args.preset)
    left = args.steps - args.warmup_steps - args.settle
    if left < 1:
        raise MetricsError(
            f"--steps {args.steps} leaves none to count after --warmup-steps {args.warmup_steps} "
            f"and --settle {args.settle}: give {1 - left} steps more."
        )
    request = Request(
        preset,
        backend,
        args.nproc or preset.nproc,
        args.steps,
        args.warmup_steps,
        None if args.scopes is None else tuple(args.scopes),
        tuple(extra),
        args.deterministic,
    )
    with _work_directory(args.work_dir) as directory:
        data = from_text(python_sources(), directory / "data", "Python's own library")
        outcome = records(request, data, directory, args.timeout)
    measurement = measure(request, outcome, args.settle)
    notice = f" ({TAPE_NOTICE})" if backend == TAPE else ""
    title = f"Overheads of {preset.name} on {request.nproc} x {_device(outcome)}{notice}"
    print_table(Console(), title, measurement)
    text = json.dumps(measurement.as_json(), indent=1)
    write_text(args.out / "overheads.json", text + "\n")
    write_text(args.out / "overheads.md", as_markdown(title, measurement))
    print(f"written: {args.out / 'overheads.json'} and overheads.md")


def measure(request: Request, outcome: Outcome, settle: int) -> Measurement:
    """The metrics of both runs. Raises MetricsError where they show nothing."""
    eager: Any = outcome.eager
    graphed: Any = outcome.graphed
    ranks = tuple(metrics(graphed[rank], settle) for rank in sorted(graphed))
    first = first_counted(graphed[0], settle)
    on_gpus = request.backend != TAPE
    run = {
        "preset": request.preset.name,
        "backend": request.backend,
        "processes": request.nproc,
        "steps": request.steps,
        "first_counted_step": first + 1,
        "scopes": list(request.chosen_scopes),
        "deterministic": request.deterministic or not on_gpus,
        "flags": [*request.preset.arguments(), *request.extra] if on_gpus else [],
    }
    versions = graphed[0]["versions"]
    return Measurement(run, machine(), versions, step_times(eager[0], first), ranks)


def _device(outcome: Outcome) -> str:
    graphed: Any = outcome.graphed
    return str(graphed[0]["device"])


@contextmanager
def _work_directory(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="megatron-cg-overheads-") as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main())
