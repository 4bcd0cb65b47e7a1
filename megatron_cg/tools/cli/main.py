"""``megatron-cg COMMAND ...``: finds the command's module and runs it."""

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cli import ENDING
from megatron_cg.version import __version__

COMMANDS = ("align", "bench", "doctor", "plan", "precompile", "report")
"""The module of each has ``add_arguments(parser)`` and ``run(args, extra) -> int``."""

TAKING_FLAGS = ("align", "bench", "plan")
"""The commands that take Megatron's flags after a bare ``--``."""

USAGE_ERROR = 2
DEFECT = 70
"""From sysexits.h, for an error that no command expects; 1 is a result of a command."""
INTERRUPTED = 130
"""A shell's exit code for a process that SIGINT ended."""
NO_READER = 141
"""A shell's exit code for a process that SIGPIPE ended: the reader is gone, as with ``| head``."""

_received: list[int] = []
"""Signals that have come since the command began."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: its own, or one of the above."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"megatron-cg {words[0]}" if words and words[0] in COMMANDS else "megatron-cg"
    try:
        _end_in_order()
        _open_closed_streams()
        try:
            return _run(words)
        finally:
            sys.stdout.flush()  # Here, so that a full disk or a reader that has gone is seen.
    except BaseException as error:
        # rich raises SystemExit when the reader is gone.
        if BrokenPipeError in (type(error), type(error.__context__)):
            return NO_READER
        if isinstance(error, SystemExit):
            raise
        # An import that a signal interrupts may end in another error, as numpy's does.
        text, code = ("interrupted", 128 + _received[0]) if _received else _told(error)
        with contextlib.suppress(OSError):
            print(f"{name}: {text}", file=sys.stderr)
        return code
    finally:
        _drop_unwritten()


def _run(words: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print every result, even if stdout cannot encode some characters.
        sys.stdout.reconfigure(errors="replace")
    # Words after a bare "--" are for Megatron, whatever they look like.
    cut = words.index("--") if "--" in words else len(words)
    args, extra = _parsed(words[:cut]), words[cut + 1 :]
    if extra and args.command not in TAKING_FLAGS:
        raise MegatronCGError(f"{args.command} passes nothing on: leave out {' '.join(extra)}")
    # Megatron warns at import about each optional package that is missing.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    # And torch warns if there is nvcc but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return int(args.run(args, extra))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-cg", description="Partial CUDA graphs under Megatron-FSDP, bit for bit."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"megatron_cg.tools.cli.{name}")
        text = (module.__doc__ or "").strip()
        sub = commands.add_parser(name, help=text.splitlines()[0], description=text)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        takes_flags = args.command in TAKING_FLAGS
        hint = " (Megatron's own come after a bare --)" if takes_flags else ""
        text = f"unrecognized arguments: {' '.join(unknown)}{hint}"
        commands.choices[args.command].error(text)
    return args


def _told(error: BaseException) -> tuple[str, int]:
    if isinstance(error, MegatronCGError):
        return str(error), USAGE_ERROR
    if isinstance(error, OSError):
        # A folder that is not writable, a missing file, a full disk.
        return f"{error.filename or 'output'}: {error.strerror or error}", USAGE_ERROR
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    traceback.print_exception(error)
    text = "this was not foreseen. If the lines above end in megatron_cg, please report them"
    return text, DEFECT


def _open_closed_streams() -> None:
    """Connect standard streams that are closed, as with ``>&-``, to the null device.

    Otherwise the next file that is opened would take the stream's number, and what a process
    started here prints would go into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _drop_unwritten() -> None:
    """Drop what a stream cannot take, or Python would try again at exit and fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end_in_order() -> None:
    """Let a signal of ``ENDING`` raise ``SystemExit`` in the main thread, and note it and Ctrl-C.

    The exit code is 128 plus the signal's number, as in a shell. An ignored signal, as under
    ``nohup``, stays ignored.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        _received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    _received.clear()
    for ending in (signal.SIGINT, *ENDING):
        if signal.getsignal(ending) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(ending, end)


if __name__ == "__main__":
    sys.exit(main())
