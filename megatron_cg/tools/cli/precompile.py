"""Compile a region once, without a GPU and without weights, for all ranks of a run.

BUILD is FILE.py:FUNCTION or MODULE:FUNCTION. The function makes the process groups, builds the
module on the meta device, and returns a megatron_cg.precompile.region.Region. It is called once for
each traced rank. Exit code 0: written; 2: the region cannot be compiled, with the module and what
to do.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cli.numbers import positive, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add("build", metavar="BUILD", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    add("--out", type=Path, required=True, metavar="DIR", help="where to write the artifact")
    add("--name", help="name of the artifact (default: that of the function)")
    add(
        "--world-size",
        type=positive,
        required=True,
        help="ranks while tracing, as many as the groups of the region need at least; the artifact "
        "serves any run with groups of these sizes",
    )
    add(
        "--ranks",
        type=whole,
        nargs="+",
        metavar="RANK",
        help="ranks to trace and compare (default: 0, all that share a group of the region with "
        "it, and the last)",
    )
    add(
        "--capability",
        type=capability,
        default=(9, 0),
        help="compute capability of the GPUs that will load it, or cpu (default: 9.0)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="trace under torch.use_deterministic_algorithms(True), as Megatron's "
        "--deterministic-mode runs",
    )


def capability(text: str) -> tuple[int, int] | None:
    """``9.0`` as (9, 0); ``cpu`` as None."""
    if text == "cpu":
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a compute capability, such as 9.0, nor cpu"
        )
    return int(major), int(minor)


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Trace, write and report; returns the exit code."""
    if extra:
        raise MegatronCGError(
            f"nothing is passed on to {args.build}: leave out {' '.join(extra)} after --"
        )
    build = builder(args.build)
    import torch

    from megatron_cg.precompile.save import save

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(args.deterministic or before)
    try:
        saved = save(
            build,
            args.out,
            name=args.name or args.build.rpartition(":")[2],
            world_size=args.world_size,
            ranks=args.ranks,
            capability=args.capability,
        )
    finally:
        torch.use_deterministic_algorithms(before)
    manifest = saved.manifest
    ranks = ", ".join(map(str, manifest.traced_ranks))
    print(
        f"{args.out / manifest.name}.artifact: {manifest.artifact_bytes} bytes of code, without "
        f"weights\ntraced as ranks {ranks} of {manifest.world_size}: the same operations and "
        f"constants\ngroups: {', '.join(manifest.roles) or 'none'}\n"
        f"SHA-256 of the manifest: {saved.manifest_sha256}"
    )
    return 0


def builder(text: str) -> Any:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names.

    A file is imported as a module of its own name, since code that is loaded looks for it there.
    Raises MegatronCGError if there is none.
    """
    module_name, colon, function = text.rpartition(":")
    if not colon:
        raise MegatronCGError(f"{text} names no function: write {text}:FUNCTION")
    if module_name.endswith(".py"):
        file = Path(module_name)
        if not file.is_file():
            raise MegatronCGError(f"there is no file {file}")
        sys.path.insert(0, str(file.resolve().parent))
        module_name = file.stem
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise MegatronCGError(f"there is no module {module_name}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise MegatronCGError(f"{module_name} has no function {function}")
    return found
