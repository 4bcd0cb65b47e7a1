"""Compile a layer once, without a GPU and without weights, for all ranks of a run.

BUILD is FILE.py:FUNCTION or MODULE:FUNCTION. The function makes the process groups, builds the
module on the meta device, and returns a megatron_cg.compiled.region.Region. It is called once for
each traced rank. Exit code 0: written; 2: the layer cannot be compiled, with the module and what to
do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cli.options import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add("build", metavar="BUILD", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    add("--out", type=Path, metavar="DIR", required=True, help="where to write the artifact")
    add(
        "--world-size",
        type=positive,
        required=True,
        help="ranks while tracing, as many as the groups of the region need at least; the artifact "
        "serves any run with groups of these sizes",
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
    """``9.0`` as (9, 0); ``cpu`` as None. Raises ValueError otherwise."""
    if text == "cpu":
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


_CACHES_OFF = ("TORCHINDUCTOR_AUTOGRAD_CACHE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
"""Variables with which torch can save no code; it reads them when it is imported. A run may have
them, as those of ``megatron-cg align`` do. What is traced has a new cache anyway."""


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Trace, write and report; returns the exit code."""
    if "torch" not in sys.modules:
        for name in _CACHES_OFF:
            os.environ.pop(name, None)
    if extra:
        raise MegatronCGError(
            f"nothing is passed on to {args.build}: leave out {' '.join(extra)} after --"
        )
    build = builder(args.build)
    import torch

    from megatron_cg.compiled.save import save

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(args.deterministic or before)
    try:
        name = args.build.rpartition(":")[2]
        manifest = save(
            build, args.out, name=name, world_size=args.world_size, capability=args.capability
        )
    finally:
        torch.use_deterministic_algorithms(before)
    ranks = ", ".join(map(str, manifest.traced_ranks))
    print(
        f"{args.out / name}.artifact: {manifest.code_bytes} bytes of code, without weights\n"
        f"traced as ranks {ranks} of {manifest.world_size}: the same operations and constants"
    )
    return 0


def builder(text: str) -> Callable[[], Any]:
    """The function that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` names; it makes a region.

    A file is imported as a module of its own name, since code that is loaded looks for it there,
    and a module is also looked for in the working directory, as by ``python -m``.
    Raises MegatronCGError if there is none.
    """
    module_name, colon, function_name = text.rpartition(":")
    if not colon:
        raise MegatronCGError(f"{text} names no function: type FILE.py:FUNCTION or MODULE:FUNCTION")
    folder = Path()
    if module_name.endswith(".py"):
        file = Path(module_name)
        if not file.is_file():
            raise MegatronCGError(f"there is no file {file}")
        folder, module_name = file.parent, file.stem
    sys.path.insert(0, str(folder.resolve()))
    with _of_the_user(f"{module_name} cannot be imported:"):
        function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise MegatronCGError(f"{module_name} has no function {function_name}")

    def build() -> Any:
        from megatron_cg.compiled.region import Region

        with _of_the_user(f"{text} raised"):
            region = function()
        if not isinstance(region, Region):
            kind = type(region).__name__
            raise MegatronCGError(f"{text} returned {kind}, not a {Region.__module__}.Region")
        return region

    return build


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
