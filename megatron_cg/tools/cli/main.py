"""``megatron-cg COMMAND ...``: the options of each command, and how each ends."""

import argparse
import importlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getdoc
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_cg.arguments.schema import NATIVE, SCOPES, TAPE, TRANSFORMER_ENGINE
from megatron_cg.errors import MegatronCGError
from megatron_cg.extensions import needed_by
from megatron_cg.tools.align.presets import preset_names
from megatron_cg.version import __version__

Add = Callable[..., Any]
"""``add_argument`` of a command's parser."""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of ``timeout``, batch systems and closed terminals. Python converts only SIGINT to an
exception. The others would end it at once, and its runs on GPUs would disturb later ones."""

TAKING_FLAGS = ("align", "bench", "plan")
"""The commands that take Megatron's flags after a bare ``--``."""

_JSON = "print the result as one line of JSON"
USAGE_ERROR = 2
DEFECT = 70  # of sysexits.h, for an error that no command expects; 1 is a result of a command
INTERRUPTED = 130  # a shell's for SIGINT


def whole(text: str, least: int = 0) -> int:
    """A whole number of ``least`` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return int(text)


positive = partial(whole, least=1)


def align(add: Add) -> None:
    """Train twice, eagerly and with CUDA graphs, and compare bit for bit.

    The same model, data and seed; loss and gradient norm of every step and, at the end, every
    parameter shard. Exit code 0: identical; 1: different; 3: a run failed; 2: cannot be run or
    compared as asked. Arguments after a bare -- are for the script: Megatron's flags and
    --cg-grouped-gemm for both runs, and flags of this package about graphs, such as --cg-layers,
    for the run with graphs. Without --data-path there, the data are Python's own sources, as bytes.
    """
    names = ", ".join(preset_names())
    add("--preset", default="llama-tiny", metavar="NAME", help=f"model shape: {names}")
    add("--steps", type=positive, default=12, help="training steps (default 12)")
    add("--warmup-steps", type=whole, default=3, help="eager steps first (default 3)")
    text = f"what to capture, of {', '.join(SCOPES)}; none: whole layers"
    add("--scopes", nargs="*", choices=SCOPES, metavar="SCOPE", help=text)
    text = "of both runs; 2 needs megatron-core 0.20 (default 1)"
    add("--megatron-fsdp-version", type=int, choices=(1, 2), default=1, help=text)
    text = "processes, one a GPU (default: the preset's, or as many as there are GPUs)"
    add("--nproc", type=positive, help=text)
    add("--script", type=Path, help="a Megatron pretraining script (default: the shipped one)")
    backends = ("auto", TRANSFORMER_ENGINE, NATIVE, TAPE)
    add("--backend", choices=backends, default="auto", help="auto: the tape without a GPU")
    add("--work-dir", type=Path, metavar="DIR", help="keep logs and records here")
    add("--timeout", type=positive, default=1800, help="seconds that a run may take")
    text = "train nothing, and compare what two runs with --cg-record have left"
    add("--records", nargs=2, type=Path, metavar=("EAGER", "GRAPHS"), help=text)
    add("--json", action="store_true", help=_JSON)


def bench(add: Add) -> None:
    """Measure what graphs save: step time, TFLOP/s, tokens/s, memory, from Megatron's own log.

    Starts one training in turn: under Megatron-FSDP eagerly, under DDP with Megatron's own graphs,
    and under Megatron-FSDP with graphs. Give the launch line of your script after a bare --, with
    --use-megatron-fsdp; its flags are edited for each run, and --dry-run shows them. Nothing is
    loaded or saved. Or give --preset, and further flags of Megatron after --. Exit code 0: all runs
    were made; 3: a run failed; 2: cannot be run as asked.
    """
    add("--preset", metavar="NAME", help=f"a model: {', '.join(preset_names())}")
    add("--nproc", type=positive, help="GPUs of a preset's run (default: the preset's)")
    add("--microbatches", type=positive, default=2, help="of a preset's step (default 2)")
    text = "runs, of eager,ddp,graphs (default) and eager-gemm: eager with the graphs' grouped GEMM"
    add("--only", metavar="NAMES", help=text)
    add("--steps", type=positive, default=20, help="steps that are measured (default 20)")
    text = "steps before them, capture included (default 30)"
    add("--settle-steps", type=positive, default=30, help=text)
    add("--out", type=Path, metavar="JSON", help="write all numbers, commands and versions here")
    add("--work-dir", type=Path, metavar="DIR", help="keep logs here")
    add("--timeout", type=positive, default=1800, help="seconds that a run may take")
    add("--dry-run", action="store_true", help="print the command lines, and run nothing")


def doctor(add: Add) -> None:
    """Check this machine: what prevents CUDA graphs here, and what to type.

    Prints what is wrong first, with the reason and what to type, then the facts: versions, driver,
    libraries, symbols that this package relies on, environment variables. Nothing is changed. Exit
    code 0: graphs can run (with --backend tape: the comparison on the CPU can); 1: something
    prevents them.
    """
    text = "what captures: TE on GPUs (default), torch alone on GPUs, or the tape without a GPU"
    backends = (TRANSFORMER_ENGINE, NATIVE, TAPE)
    add("--backend", choices=backends, default=TRANSFORMER_ENGINE, help=text)
    add("--json", action="store_true", help=_JSON)


def plan(add: Add) -> None:
    """Without a GPU: a launch line that trains with graphs, what it captures, and whether it fits.

    Give after a bare -- the whole command that starts the run now. Exit code 0: the printed command
    starts and fits; 1: it is refused or does not fit; 2: the command cannot be read.
    """
    add("--gpus", type=positive, help="GPUs of the whole run (default: what the launcher says)")
    add("--gpu-memory", type=positive, default=80, help="GB of one GPU (default: 80)")
    add("--json", action="store_true", help=_JSON)


_MODULES = {
    align: "align.align_command",
    bench: "bench.bench_command",
    doctor: "doctor.checks",
    plan: "plan.report",
}
"""The module of each command; its function ``invoke`` runs it, and returns the exit code."""
COMMANDS = {command.__name__: command for command in _MODULES}


def invoke(command: str, args: argparse.Namespace, extra: Sequence[str]) -> int:
    module = importlib.import_module(f"megatron_cg.tools.{_MODULES[COMMANDS[command]]}")
    return int(module.invoke(args, extra))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: its own, or one of the above."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"megatron-cg {words[0]}" if words and words[0] in COMMANDS else "megatron-cg"
    if argv is None and words[:1] == ["plan"]:  # It starts no process.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # A reader that has gone, as with | head.
        # It runs no model, and a third of Megatron's import is that of torch's compiler.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    try:
        _end_in_order()
        return _run(words)
    except SystemExit:
        raise
    except BaseException as error:
        text, code = _told(error)
        print(f"{name}: {text}", file=sys.stderr)
        return code


def _run(words: Sequence[str]) -> int:
    # Words after a bare "--" are for Megatron, whatever they look like.
    cut = words.index("--") if "--" in words else len(words)
    args, extra = _parsed(words[:cut]), words[cut + 1 :]
    if extra and args.command not in TAKING_FLAGS:
        raise MegatronCGError(f"{args.command} passes nothing on: leave out {' '.join(extra)}")
    # Megatron warns at import about each optional package that is missing.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    # And torch warns if there is nvcc but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.WARNING)  # It tells of layouts that it reads.
    with needed_by(args.command):
        return invoke(args.command, args, extra)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-cg", description="CUDA graphs of layers under Megatron-FSDP, bit for bit."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = getdoc(command) or ""
        command(commands.add_parser(name, help=text.splitlines()[0], description=text).add_argument)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        hint = " (Megatron's own come after a bare --)" if args.command in TAKING_FLAGS else ""
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


def _end_in_order() -> None:
    """Let a signal of ``ENDING`` raise ``SystemExit`` in the main thread, with a shell's exit code.

    One that is ignored, as under ``nohup``, stays ignored.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for ending in ENDING:
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, end)


if __name__ == "__main__":
    sys.exit(main())
