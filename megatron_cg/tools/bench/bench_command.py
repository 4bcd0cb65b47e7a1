"""Runs one call of ``megatron-cg bench``: the runs in turn, the table, the JSON."""

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cg.__main__ import CACHE_ENTRIES, CACHE_VARIABLE
from megatron_cg.files import whole_file
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.processes import Run, log_tail
from megatron_cg.tools.align.run import DETERMINISTIC_ENVIRONMENT, PACKAGE, environment, torch_cudnn
from megatron_cg.tools.align.token_data import from_text, python_sources
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.configurations import captured, chosen, edited, given_line, preset_line
from megatron_cg.tools.bench.readings import read_log
from megatron_cg.tools.bench.results import SCHEMA, machine, print_results, summaries
from megatron_cg.tools.launch_line import LaunchLine

INCOMPLETE = 3  # the exit code when a run failed
_SETTINGS = ("settle_steps", "steps", "log_interval")
_TAIL = 20  # lines of a failed run's log


@dataclass(frozen=True)
class PlannedRun:
    """One run: a configuration in a round, with its edited line."""

    configuration: str
    round: int
    line: LaunchLine

    @property
    def name(self) -> str:
        return f"{self.configuration}.{self.round}"


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="megatron-cg-bench-") as temporary:
        folder = (args.work_dir or Path(temporary)).resolve()
        line = _line(args, extra, folder)
        names = chosen(args.only, line)
        runs = _planned(args, line, names)
        if args.dry_run:
            for run in runs:
                print(f"# {run.name}\n{shlex.join(run.line.command)}")
            return 0
        results: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": machine(),
            "settings": {name: getattr(args, name) for name in _SETTINGS},
            "runs": [],
        }
        _write(args.out, results)  # It may not be writable, and the runs take long.
        for run in runs:
            results["runs"].append(_made(run, folder / run.name, args))
            results["summary"] = summaries(results, names)
            _write(args.out, results)
    print_results(results)
    if args.out is not None:
        print(f"written: {args.out}")
    return INCOMPLETE if any(run["error"] for run in results["runs"]) else 0


def _write(out: Path | None, results: Mapping[str, Any]) -> None:
    if out is not None:
        with whole_file(out) as part:
            part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _line(args: argparse.Namespace, extra: Sequence[str], folder: Path) -> LaunchLine:
    if args.preset is None:
        return given_line(extra)
    preset = load_preset(args.preset)
    return preset_line(
        preset,
        from_text(python_sources(), folder / "data"),
        nproc=args.nproc or preset.nproc,
        microbatches=args.microbatches,
        steps=args.settle_steps + args.steps,
        extra=extra,
    )


def _planned(args: argparse.Namespace, line: LaunchLine, names: Sequence[str]) -> list[PlannedRun]:
    """The runs in their order. Every other round is in reverse, against a steady drift."""
    runs, steps = [], args.settle_steps + args.steps
    for number in range(1, args.rounds + 1):
        for name in names if number % 2 else reversed(names):
            made = edited(line, name, steps=steps, every=args.log_interval)
            runs.append(PlannedRun(name, number, made))
    return runs


def _made(planned: PlannedRun, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make one run; returns what is known of it, for JSON. A failure is printed."""
    # Without our launcher too, cuBLASLt's cache is as large as with it.
    env = {CACHE_VARIABLE: str(CACHE_ENTRIES), **os.environ}
    if args.preset is not None:
        like_align = environment(env, root=PACKAGE.parent, cudnn=torch_cudnn())
        env = {n: value for n, value in like_align.items() if n not in DETERMINISTIC_ENVIRONMENT}
    run = Run(planned.name, planned.line.command, env, folder)
    made: dict[str, Any] = {
        "configuration": planned.configuration,
        "round": planned.round,
        "captured": captured(planned.line),
        "command": planned.line.command,
        "error": "",
    }
    failure, text = run.make(args.timeout), run.text()
    try:
        if failure:
            raise BenchError(failure)
        made |= read_log(text, settle=args.settle_steps, steps=args.steps, every=args.log_interval)
    except BenchError as error:
        made["error"] = str(error)
        made["tail"] = log_tail(text).splitlines()[-_TAIL:]
        print(*made["tail"], sep="\n", file=sys.stderr)
        print(f"the run {planned.name} failed: {error}", file=sys.stderr, flush=True)
    return made
