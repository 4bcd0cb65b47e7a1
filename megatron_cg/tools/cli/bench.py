"""Measure what graphs save against the usual baselines.

Trains each configuration in turn on the same GPUs, with the same settings: Megatron-FSDP eager and
with graphs, DDP eager and with Megatron's own graphs, and for dense models a graph of the whole
iteration. Writes bench.json, bench.md, bench.html and plots to --out, and keeps the results of
earlier runs there. Exit code 0: all runs were made; 3: a run failed or was left out; 2: cannot be
run as asked. Arguments after a bare -- are Megatron's own, for all configurations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_cg.arguments.schema import SCOPES, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.bench.runs.shapes import SHAPES
from megatron_cg.tools.cli.options import positive, seconds, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="results, tables and plots")
    add("--shapes", nargs="+", metavar="PRESET", help=f"models (default: {' '.join(SHAPES)})")
    add("--only", metavar="NAMES", help="configurations, separated by commas (default: all)")
    add(
        "--grouped-gemm",
        choices=("default", "cutlass", "both"),
        default="default",
        help="of experts, the same for all configurations of a table (default: TE's default)",
    )
    add("--nproc", type=positive, help="processes, one a GPU (default: the preset's)")
    add("--layers", type=positive, help="layers (default: the preset's)")
    add("--microbatches", type=positive, help="of a step (default 2; on the tape 1)")
    add(
        "--scopes",
        nargs="*",
        choices=SCOPES,
        metavar="SCOPE",
        help="of partial graphs (default: all that fit)",
    )
    add("--scale", metavar="WHAT=N,N", help="grow layers, microbatches or nproc: layers=4,8,16,32")
    add(
        "--rounds",
        type=positive,
        default=1,
        metavar="N",
        help="run all configurations of a table in turn N times, every other time in reverse order "
        "(default 1; an even N is best). Machines drift by 10%% and more within minutes, so "
        "ratios are taken within a round. Only the first round is probed, sampled and profiled",
    )
    _add_windows(parser)
    add("--rope-fusion", action="store_true", help="fused rotary embedding, Megatron's default")
    add("--check-for-nan", action="store_true", help="leave Megatron's check of gradients on")
    add("--data-path", metavar="PREFIX", help="data in Megatron's indexed format")
    backends = ("auto", TRANSFORMER_ENGINE, TAPE)
    add("--backend", choices=backends, default="auto", help="auto: the tape without a GPU")
    add(
        "--budget-seconds",
        type=seconds,
        metavar="S",
        help="begin no run that would end after it",
    )
    add("--timeout", type=seconds, default=300.0, help="seconds that a run may take (default 300)")
    add("--work-dir", type=Path, metavar="DIR", help="data, logs, traces (default: in --out)")
    add("--keep-traces", action="store_true", help="keep torch.profiler's traces in --work-dir")
    add("--dry-run", action="store_true", help="print the commands and how long they may take")
    add("--report", action="store_true", help="run nothing; tables and plots of what is in --out")
    add("--compare", type=Path, metavar="JSON", help="an earlier bench.json to compare with")


def _add_windows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--warmup-steps", type=whole, default=3, help="eager steps before capture (default 3)")
    add("--settle-steps", type=whole, default=5, help="steps after that, not measured (default 5)")
    add("--timed-steps", type=positive, default=20, help="steps that are timed (default 20)")
    add("--probe-steps", type=whole, help="steps for host time by phase (default 4; scaling: 0)")
    add(
        "--profile-steps",
        type=whole,
        help="steps that are traced by the device alone, and as many with host events "
        "(default 2; scaling: 0)",
    )
    add(
        "--sample",
        action="store_true",
        help="a sampling profile of the host too, by py-spy, as a file for speedscope",
    )
    add(
        "--sample-native",
        action="store_true",
        help="the same with native frames. py-spy reads symbols for minutes while the run stands "
        "still, so give a longer --timeout",
    )
    add("--sample-steps", type=positive, default=20, help="steps of it (default 20)")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Measure and write the results; returns the exit code."""
    from megatron_cg.tools.bench.bench_command import invoke

    return invoke(args, extra)
