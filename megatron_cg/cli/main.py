"""``megatron-cg COMMAND ...``: finds the command's module and runs it."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_cg import __version__
from megatron_cg.cli.signals import ended_in_order
from megatron_cg.errors import MegatronCGError

COMMANDS = {
    "align": "megatron_cg.cli.align",
    "bench": "megatron_cg.cli.bench",
    "doctor": "megatron_cg.cli.doctor",
    "plan": "megatron_cg.cli.plan",
    "report": "megatron_cg.cli.report",
}
"""Each command's module; it has ``add_arguments(parser)`` and ``run(args, extra) -> int``."""

TAKING_FLAGS = ("align", "bench", "plan")
"""The commands to which Megatron's flags are given, after a bare ``--``."""

USAGE_ERROR = 2
INTERRUPTED = 130
"""As a shell has it of what SIGINT ended."""
NO_READER = 1
"""What rich ends a command with whose reader has gone, as with ``| head``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: its own, or 2 for what cannot be done as asked."""
    _make_printable()
    words = list(sys.argv[1:] if argv is None else argv)
    # What follows a bare "--" is for Megatron, whatever it looks like.
    cut = words.index("--") if "--" in words else len(words)
    words, extra = words[:cut], words[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="megatron-cg", description="Partial CUDA graphs under Megatron-FSDP, bit for bit."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Only the command's own module, where one is named: another's may import what is broken here.
    for name in [word for word in words[:1] if word in COMMANDS] or COMMANDS:
        module = importlib.import_module(COMMANDS[name])
        text = (module.__doc__ or "").strip()
        sub = commands.add_parser(name, help=text.splitlines()[0], description=text)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        hint = " (Megatron's own come after a bare --)" if args.command in TAKING_FLAGS else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    # Megatron warns, as it is imported, of each optional package that is not there.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    # And torch warns where there is nvcc and no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        with ended_in_order():
            code = int(args.run(args, extra))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What is left is for nobody, also when Python flushes on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except MegatronCGError as error:
        print(f"megatron-cg {args.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        # A folder that cannot be written, a file that is not there: no verdict of the command's.
        where = error.filename or "output"
        print(f"megatron-cg {args.command}: {where}: {error.strerror}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"megatron-cg {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _make_printable() -> None:
    """No verdict is lost for want of a terminal: closed, or with an alphabet of its own."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
