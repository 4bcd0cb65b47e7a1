"""The flags for what to capture, shared by commands that plan or run."""

from __future__ import annotations

import argparse

from megatron_cg.arguments.schema import SCOPES


def add_scopes(parser: argparse.ArgumentParser) -> None:
    """Add ``--scopes``, ``--cg-layers`` and ``--cg-grouped-gemm``."""
    parser.add_argument(
        "--scopes",
        nargs="*",
        choices=SCOPES,
        metavar="SCOPE",
        help=f"what to capture, of {', '.join(SCOPES)}; none: whole layers",
    )
    parser.add_argument(
        "--cg-layers", nargs="*", default=[], metavar="SCOPE:RANGES", help="as in a training run"
    )
    parser.add_argument(
        "--cg-grouped-gemm",
        choices=("te", "torch"),
        default="te",
        help="as in a training run; align gives it to the run with graphs alone",
    )
