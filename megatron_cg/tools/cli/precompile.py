"""Compile a layer once, without a GPU and without weights, for all ranks of a run.

For a run of Megatron: give its script, or a preset, and after a bare -- the flags of the run; or
after -- its whole command line. The flags say where the artifact goes. For a loop of your own BUILD
is FILE.py:FUNCTION or MODULE:FUNCTION. The function makes the process groups, builds the module on
the meta device, and returns a megatron_cg.precompile.region.Region. It is called once for each
traced rank. Exit code 0: written; 2: the layer cannot be compiled, with the module and what to do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cli.options import positive, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add(
        "build",
        nargs="?",
        metavar="BUILD",
        help="a script of Megatron, a preset, FILE.py:FUNCTION or MODULE:FUNCTION",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write the artifact of a function",
    )
    add("--name", help="name of the artifact of a function (default: that of the function)")
    add(
        "--world-size",
        type=positive,
        help="ranks while tracing, as many as the groups of the region need at least; the artifact "
        "serves any run with groups of these sizes (default for a run: the fewest, at least 2)",
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


_CACHES_OFF = ("TORCHINDUCTOR_AUTOGRAD_CACHE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
"""Variables with which torch can save no code; it reads them when it is imported. A run may have
them, as those of ``megatron-cg align`` do. What is traced has a new cache anyway."""


@dataclass(frozen=True)
class _Job:
    """What is compiled, and where it goes."""

    build: Any
    name: str
    folder: Path
    world_size: int
    deterministic: bool


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Trace, write and report; returns the exit code."""
    if "torch" not in sys.modules:
        for name in _CACHES_OFF:
            os.environ.pop(name, None)
    job = _of_function(args, extra) if ":" in (args.build or "") else _of_run(args, extra)
    import torch

    from megatron_cg.precompile.save import save

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(job.deterministic or before)
    try:
        saved = save(
            job.build,
            job.folder,
            name=job.name,
            world_size=job.world_size,
            ranks=args.ranks,
            capability=args.capability,
        )
    finally:
        torch.use_deterministic_algorithms(before)
    manifest = saved.manifest
    ranks = ", ".join(map(str, manifest.traced_ranks))
    print(
        f"{job.folder / manifest.name}.artifact: {manifest.artifact_bytes} bytes of code, without "
        f"weights\ntraced as ranks {ranks} of {manifest.world_size} in {manifest.seconds:.1f} s: "
        f"the same operations and constants\ngroups: {', '.join(manifest.roles) or 'none'}\n"
        f"SHA-256 of the manifest: {saved.manifest_sha256}"
    )
    return 0


def _of_function(args: argparse.Namespace, extra: Sequence[str]) -> _Job:
    if extra:
        raise MegatronCGError(
            f"nothing is passed on to {args.build}: leave out {' '.join(extra)} after --"
        )
    if args.out is None or args.world_size is None:
        raise MegatronCGError(f"{args.build} needs --out DIR and --world-size N")
    name = args.name or args.build.rpartition(":")[2]
    return _Job(builder(args.build), name, args.out, args.world_size, args.deterministic)


def _of_run(args: argparse.Namespace, extra: Sequence[str]) -> _Job:
    if args.out is not None or args.name is not None:
        raise MegatronCGError(
            "--out and --name are for a function, FILE.py:FUNCTION: the artifact of a run goes to "
            "its --cg-precompile-dir"
        )
    from megatron_cg.integrations.megatron.layer_code import NAME
    from megatron_cg.tools.plan.compiled import read_run

    found = read_run(args.build, extra, args.world_size)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    deterministic = bool(found.args.deterministic_mode or args.deterministic)
    return _Job(found.build, NAME, found.folder, found.args.world_size, deterministic)


def builder(text: str) -> Any:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names.

    A file is imported as a module of its own name, since code that is loaded looks for it there,
    and a module is also looked for in the working directory, as by ``python -m``.
    Raises MegatronCGError if there is none.
    """
    module_name, _, function = text.rpartition(":")
    folder = Path()
    if module_name.endswith(".py"):
        file = Path(module_name)
        if not file.is_file():
            raise MegatronCGError(f"there is no file {file}")
        folder, module_name = file.parent, file.stem
    sys.path.insert(0, str(folder.resolve()))
    with _of_the_user(f"{module_name} cannot be imported:"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name.partition(".")[0]:
                raise
            raise MegatronCGError(f"there is no module {module_name}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise MegatronCGError(f"{module_name} has no function {function}")
    return partial(_built, found, text)


def _built(function: Callable[[], Any], text: str) -> Any:
    from megatron_cg.precompile.region import Region

    with _of_the_user(f"{text} raised"):
        region = function()
    if not isinstance(region, Region):
        kind = type(region).__name__
        raise MegatronCGError(f"{text} returned {kind}, not a {Region.__module__}.Region")
    return region


@contextmanager
def _of_the_user(what: str) -> Iterator[None]:
    """Print an error of code that is not ours, and raise a MegatronCGError that begins ``what``."""
    try:
        yield
    except MegatronCGError:
        raise
    except Exception as error:
        traceback.print_exception(error)
        raise MegatronCGError(f"{what} {type(error).__name__}: {error}") from error
