"""What the command lines of several commands share: numbers, and the flags for what to capture."""

from __future__ import annotations

import argparse
import math

from megatron_cg.arguments.schema import SCOPES


def whole(text: str, least: int = 0) -> int:
    """A whole number of ``least`` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return whole(text, 1)


def seconds(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


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
