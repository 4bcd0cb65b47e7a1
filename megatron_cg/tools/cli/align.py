"""Train twice, eagerly and with CUDA graphs, and compare bit for bit.

The same model, data and seed; loss and gradient norm of every step and, at the end, every
parameter shard. Exit code 0: identical; 1: different; 3: a run failed; 2: cannot be run or compared
as asked. Arguments after a bare -- are for the script: Megatron's flags and --cg-grouped-gemm for
both runs, and flags of this package about graphs, such as --cg-layers, for the run with graphs.
Without --data-path there, the data are Python's own sources, as bytes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_cg.arguments.schema import NATIVE, SCOPES, TAPE, TRANSFORMER_ENGINE
from megatron_cg.tools.align.presets import preset_names
from megatron_cg.tools.cli import positive, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(preset_names())
    add = parser.add_argument
    add("--preset", default="llama-tiny", metavar="NAME", help=f"model shape: {names}")
    add("--steps", type=positive, default=12, help="training steps (default 12)")
    add("--warmup-steps", type=whole, default=3, help="eager steps first (default 3)")
    add(
        "--scopes",
        nargs="*",
        choices=SCOPES,
        metavar="SCOPE",
        help=f"what to capture, of {', '.join(SCOPES)}; none: whole layers",
    )
    add(
        "--megatron-fsdp-version",
        type=int,
        choices=(1, 2),
        default=1,
        help="of both runs; 2 needs megatron-core 0.20 (default 1)",
    )
    add(
        "--nproc",
        type=positive,
        help="processes, one a GPU (default: the preset's, or as many as there are GPUs)",
    )
    add("--script", type=Path, help="a Megatron pretraining script (default: the shipped one)")
    backends = ("auto", TRANSFORMER_ENGINE, NATIVE, TAPE)
    add("--backend", choices=backends, default="auto", help="auto: the tape without a GPU")
    add(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="keep logs and records here; 'megatron-cg report DIR' makes a page of them",
    )
    add("--timeout", type=positive, default=1800, help="seconds that a run may take")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    from megatron_cg.tools.align.align_command import invoke

    return invoke(args, extra)
