"""The command ``megatron-cg``, and the numbers on its command lines."""

import argparse


def whole(text: str, least: int = 0) -> int:
    """A whole number of ``least`` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def positive(text: str) -> int:
    return whole(text, 1)
