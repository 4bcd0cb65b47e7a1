"""Train twice, eagerly and with CUDA graphs, and compare bit for bit.

The same model, data and seed; loss and gradient norm of every step and, at the end, every
parameter shard. Exit code 0: identical; 1: different; 3: a run failed; 2: cannot be run as asked.
Arguments after a bare -- are Megatron's own, for both runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_cg.align.command import MUTATION_VARIABLE, Plan
from megatron_cg.align.compare import DIFFERENT, FAILED, IDENTICAL
from megatron_cg.align.data import TokenStream, existing, from_text, python_sources
from megatron_cg.align.outcome import Outcome
from megatron_cg.align.presets import Preset, load_preset, preset_names
from megatron_cg.align.processes import LaunchError, Options
from megatron_cg.align.report import as_json, print_report
from megatron_cg.align.run import align_on_gpus, example_script, gpu_count
from megatron_cg.align.tape import TAPE_NOTICE, align_on_tape, describe, tape_shape
from megatron_cg.cli.numbers import positive, seconds, whole
from megatron_cg.cli.scopes import add_scopes

EXIT_CODES = {IDENTICAL: 0, DIFFERENT: 1, FAILED: 3}
TRANSFORMER_ENGINE, TAPE = "transformer_engine", "tape"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    names = ", ".join(preset_names())
    add = parser.add_argument
    add("--preset", default="llama-tiny", metavar="NAME", help=f"model shape: {names}")
    add("--steps", type=positive, default=12, help="training steps (default 12)")
    add("--warmup-steps", type=whole, default=3, help="eager steps first (default 3)")
    add_scopes(parser)
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the model (default bf16)")
    add(
        "--nproc",
        type=positive,
        help="processes, one a GPU (default: the preset's, or as many as there are GPUs)",
    )
    add("--script", type=Path, help="a Megatron pretraining script (default: the shipped one)")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data-path", metavar="PREFIX", help="data in Megatron's indexed format")
    data.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="text to train on")
    add("--json", type=Path, metavar="OUT", help="write the whole comparison here")
    backends = ("auto", TRANSFORMER_ENGINE, TAPE)
    add("--backend", choices=backends, default="auto", help="auto: the tape without a GPU")
    add("--parallel-runs", action="store_true", help="both runs at once")
    add(
        "--eager-record", type=Path, metavar="DIR", help="the eager/record of an earlier --work-dir"
    )
    add(
        "--mutate",
        metavar="NAME",
        help="break the graph run on purpose, to see it found: that run alone has NAME in "
        f"{MUTATION_VARIABLE}, for a --script that acts on it",
    )
    add(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="keep data, logs and records here; 'megatron-cg report DIR' makes a page of them",
    )
    add("--timeout", type=seconds, default=1800.0, help="seconds that a run may take")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Align as asked; print the table, write the JSON, return the exit code."""
    preset = load_preset(args.preset)
    backend = args.backend if args.backend != "auto" else _backend_here()
    console = Console(emoji=False)
    if args.json is not None:
        # Before the runs, which may take hours.
        _check_writable(args.json)
    with _work_directory(args.work_dir) as directory:
        data = _data(args, directory / "data")
        print(f"preset {preset.name}: {preset.description}")
        print(f"data: {data.description}", flush=True)
        outcome = (_on_tape if backend == TAPE else _on_gpus)(args, preset, data, directory, extra)
    notice = TAPE_NOTICE if backend == TAPE else ""
    print_report(console, f"{preset.name} on {backend}", outcome, notice)
    if args.json is not None:
        facts = {"preset": preset.name, "backend": backend, "notice": notice}
        text = json.dumps(as_json(outcome, **facts, data=data.description), indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
        print(f"written: {args.json}")
    if args.work_dir is not None and outcome.graphed is not None:
        print(f"a page of it: megatron-cg report {shlex.quote(str(args.work_dir))}")
    return EXIT_CODES[outcome.comparison.status]


def _check_writable(path: Path) -> None:
    """Raises OSError where ``path`` cannot be written; leaves no file that was not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("a", encoding="utf-8").close()
    if is_new:
        path.unlink()


def _on_gpus(
    args: Any, preset: Preset, data: TokenStream, directory: Path, extra: Sequence[str]
) -> Outcome:
    plan = Plan(
        script=(args.script or example_script()).resolve(),
        nproc=args.nproc or max(1, min(preset.nproc, gpu_count())),
        model=tuple(preset.arguments()),
        steps=args.steps,
        scopes=preset.scopes if args.scopes is None else tuple(args.scopes),
        warmup_steps=args.warmup_steps,
        bf16=args.dtype == "bf16",
        graph_extra=("--cg-layers", *args.cg_layers) if args.cg_layers else (),
        extra=tuple(extra),
    )
    return align_on_gpus(plan, data, _options(args, directory))


def _on_tape(
    args: Any, preset: Preset, data: TokenStream, directory: Path, extra: Sequence[str]
) -> Outcome:
    layers = ["--cg-layers", *args.cg_layers] if args.cg_layers else []
    what = " ".join([*(["--script", str(args.script)] if args.script else []), *layers, *extra])
    if what:
        raise LaunchError(
            f"the tape has a training loop of its own and cannot take {what}: leave it out, or "
            f"give --backend {TRANSFORMER_ENGINE} on a machine with GPUs."
        )
    print(describe(tape_shape(preset)), flush=True)
    return align_on_tape(
        preset,
        data,
        _options(args, directory),
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        scopes=None if args.scopes is None else tuple(args.scopes),
        nproc=args.nproc or preset.nproc,
        bf16=args.dtype == "bf16",
    )


@contextmanager
def _work_directory(chosen: Path | None) -> Iterator[Path]:
    """The directory chosen, which is kept, or one that is gone afterwards."""
    if chosen is not None:
        yield chosen.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="megatron-cg-align-") as temporary:
        yield Path(temporary)


def _options(args: Any, directory: Path) -> Options:
    return Options(
        directory=directory,
        timeout=args.timeout,
        parallel=args.parallel_runs,
        eager_record=args.eager_record,
        mutation=args.mutate,
    )


def _data(args: Any, directory: Path) -> TokenStream:
    if args.data_path:
        return existing(args.data_path)
    if args.text:
        return from_text(args.text, directory, f"{len(args.text)} text files")
    return from_text(python_sources(), directory, "the sources of Python's own library")


def _backend_here() -> str:
    import torch

    return TRANSFORMER_ENGINE if torch.cuda.is_available() else TAPE
