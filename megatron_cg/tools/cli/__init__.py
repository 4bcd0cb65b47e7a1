"""The command ``megatron-cg``, what ends it, and the numbers on its command lines."""

import argparse
import signal

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of ``timeout``, batch systems and closed terminals. Python converts only SIGINT to an
exception. The others would end it at once, and its runs on GPUs would continue and disturb later
ones."""


def whole(text: str, least: int = 0) -> int:
    """A whole number of ``least`` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


def positive(text: str) -> int:
    return whole(text, 1)
