"""Measure what graphs save: step time, TFLOP/s, MFU, tokens/s and memory, from Megatron's own log.

Starts one training in turn: under Megatron-FSDP eagerly, under DDP with Megatron's own graphs, and
under Megatron-FSDP with graphs. Give the launch line of your script after a bare --, with
--use-megatron-fsdp; its flags are edited for each run, and --dry-run shows them. Nothing is loaded
or saved. Or give --preset, and further flags of Megatron after --. Exit code 0: all runs were made;
3: a run failed; 2: cannot be run as asked.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_cg.tools.align.presets import preset_names
from megatron_cg.tools.cli import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", metavar="NAME", help=f"a model: {', '.join(preset_names())}")
    add("--nproc", type=positive, help="GPUs of a preset's run (default: the preset's)")
    add("--microbatches", type=positive, default=2, help="of a preset's step (default 2)")
    add(
        "--only",
        metavar="NAMES",
        help="runs, separated by commas (default: eager,ddp,graphs). For a model with experts also "
        "eager-gemm: with the --cg-grouped-gemm of the line, or torch's",
    )
    add("--steps", type=positive, default=20, help="steps that are measured (default 20)")
    add(
        "--settle-steps",
        type=positive,
        default=30,
        help="steps before them, capture included (default 30)",
    )
    add(
        "--log-interval",
        type=positive,
        default=1,
        metavar="N",
        help="Megatron logs the mean of N steps, and waits for the GPU to do so (default 1)",
    )
    add(
        "--rounds",
        type=positive,
        default=1,
        metavar="N",
        help="make all runs in turn N times, every other time in reverse order (default 1). "
        "Machines drift by 10%% within minutes, so ratios are taken within a round",
    )
    add("--out", type=Path, metavar="JSON", help="write all numbers, commands and versions here")
    add("--work-dir", type=Path, metavar="DIR", help="keep logs here")
    add("--timeout", type=positive, default=1800, help="seconds that a run may take")
    add("--dry-run", action="store_true", help="print the command lines, and run nothing")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_cg.tools.bench.bench_command import invoke

    return invoke(args, extra)
