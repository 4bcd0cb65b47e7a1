"""Runs one call of ``megatron-cg align``, from its arguments to the result."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.files import check_writable, write_text
from megatron_cg.tools.align.align_tables import as_json, print_report
from megatron_cg.tools.align.command import Plan, by_run
from megatron_cg.tools.align.compare import DIFFERENT, FAILED, IDENTICAL, NOT_COMPARABLE
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.presets import Preset, load_preset
from megatron_cg.tools.align.processes import LaunchError, Options
from megatron_cg.tools.align.run import align_on_gpus, check_gpus, example_script, gpu_count
from megatron_cg.tools.align.tape import (
    TAPE_NOTICE,
    align_on_tape,
    check_tape,
    describe,
    tape_shape,
)
from megatron_cg.tools.align.token_data import TokenStream, cached, existing, python_sources

EXIT_CODES = {IDENTICAL: 0, DIFFERENT: 1, NOT_COMPARABLE: 2, FAILED: 3}
LOCK = ".megatron-cg-align.lock"
Align = Callable[[TokenStream], Outcome]


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Run the alignment; print the table, write the JSON, return the exit code."""
    preset = load_preset(args.preset)
    backend = args.backend if args.backend != "auto" else _backend_here()
    console = Console(emoji=False)
    if args.json is not None:
        # Before the runs, which may take hours.
        check_writable(args.json)
    with _work_directory(args.work_dir) as directory:
        options = Options(
            directory=directory,
            timeout=args.timeout,
            parallel=args.parallel_runs,
            eager_record=args.eager_record,
            mutation=args.mutate,
        )
        align = (_on_tape if backend == TAPE else _on_gpus)(args, preset, options, extra)
        data = _data(args, directory / "data")
        print(f"preset {preset.name}: {preset.description}")
        print(f"data: {data.description}", flush=True)
        outcome = align(data)
    notice = TAPE_NOTICE if backend == TAPE else ""
    print_report(console, f"{preset.name} on {backend}", outcome, notice)
    if args.json is not None:
        facts = {"preset": preset.name, "backend": backend, "notice": notice}
        text = json.dumps(as_json(outcome, **facts, data=data.description), indent=1)
        write_text(args.json, text + "\n")
        print(f"written: {args.json}")
    if args.work_dir is not None and outcome.graphed is not None:
        print(f"a page of it: megatron-cg report {shlex.quote(str(args.work_dir))}")
    return EXIT_CODES[outcome.comparison.status]


def _on_gpus(args: Any, preset: Preset, options: Options, extra: Sequence[str]) -> Align:
    """Both runs of a Megatron script; prepares their data first. Raises LaunchError."""
    LayerSelection.parse(args.cg_layers)
    both, of_graphs = by_run(extra)
    plan = Plan(
        script=(args.script or example_script()).resolve(),
        nproc=args.nproc or max(1, min(preset.nproc, gpu_count())),
        model=tuple(preset.arguments()),
        steps=args.steps,
        scopes=preset.scopes if args.scopes is None else tuple(args.scopes),
        warmup_steps=args.warmup_steps,
        bf16=args.dtype == "bf16",
        graph_extra=(*_graph_flags(args), *of_graphs),
        extra=both,
    )
    check_gpus(plan, options)
    return partial(align_on_gpus, plan, options=options)


def _graph_flags(args: Any) -> tuple[str, ...]:
    """Flags of this package for the run with graphs."""
    layers = ("--cg-layers", *args.cg_layers) if args.cg_layers else ()
    gemm = () if args.cg_grouped_gemm == "te" else ("--cg-grouped-gemm", args.cg_grouped_gemm)
    backend = ("--cg-backend", NATIVE) if args.backend == NATIVE else ()
    return (*layers, *gemm, *backend)


def _on_tape(args: Any, preset: Preset, options: Options, extra: Sequence[str]) -> Align:
    """Both runs on the CPU; prepares their data first. Raises LaunchError."""
    layers = ["--cg-layers", *args.cg_layers] if args.cg_layers else []
    what = " ".join([*(["--script", str(args.script)] if args.script else []), *layers, *extra])
    if what:
        raise LaunchError(
            f"the tape has a training loop of its own and cannot take {what}: leave it out, or "
            f"give --backend {TRANSFORMER_ENGINE} on a machine with GPUs."
        )
    scopes = None if args.scopes is None else tuple(args.scopes)
    nproc = args.nproc or preset.nproc
    steps = {"steps": args.steps, "warmup_steps": args.warmup_steps}
    check_tape(preset, options, nproc=nproc, **steps)
    print(describe(tape_shape(preset)), flush=True)
    given = {"scopes": scopes, "nproc": nproc, "bf16": args.dtype == "bf16", **steps}
    given["grouped_gemm"] = args.cg_grouped_gemm
    return partial(align_on_tape, preset, options=options, **given)


@contextmanager
def _work_directory(chosen: Path | None) -> Iterator[Path]:
    """The chosen directory, locked and kept, or a temporary one."""
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="megatron-cg-align-") as temporary:
            yield Path(temporary)
        return
    directory = chosen.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"--work-dir {chosen}: another align is running there, and their records would "
                "mix: wait until it ends, or give another folder."
            ) from None
        except OSError as error:
            # The file system has no locks; everything else works on it.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        yield directory


def _data(args: Any, directory: Path) -> TokenStream:
    if args.data_path:
        return existing(args.data_path)
    if args.text:
        return cached(args.text, f"{len(args.text)} text files", directory)
    return cached(python_sources(), "the sources of Python's own library", directory)


def _backend_here() -> str:
    import torch

    return TRANSFORMER_ENGINE if torch.cuda.is_available() else TAPE
