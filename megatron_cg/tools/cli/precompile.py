"""Compile a layer once, without a GPU and without weights, for all ranks of a run.

The function makes the process groups, builds the module on the meta device, and returns a
megatron_cg.compiled.region.Region. It is called once for each traced rank. Exit code 0: written; 2:
the layer cannot be compiled, with the module and what to do.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cli import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("build", metavar="FILE.py:FUNCTION", help="what builds the layer")
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


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    build = builder(args.build)
    import torch

    from megatron_cg.compiled.save import save

    torch.use_deterministic_algorithms(args.deterministic)
    name = args.build.rpartition(":")[2]
    manifest = save(
        build, args.out, name=name, world_size=args.world_size, capability=args.capability
    )
    ranks = ", ".join(map(str, manifest.traced_ranks))
    print(
        f"wrote {args.out / name}.artifact, without weights\n"
        f"traced as ranks {ranks} of {args.world_size}: the same operations and constants"
    )
    return 0


def builder(text: str) -> Callable[[], Any]:
    """The function that ``FILE.py:FUNCTION`` names; it makes a region.

    The file is imported as a module of its own name, since code that is loaded looks for it there.
    Raises MegatronCGError if there is no such file or function.
    """
    file, _, name = text.rpartition(":")
    if not Path(file).is_file():
        raise MegatronCGError(f"{text} names no file and function: type FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(file).parent.resolve()))
    function = getattr(importlib.import_module(Path(file).stem), name, None)
    if not callable(function):
        raise MegatronCGError(f"{file} has no function {name}")

    def build() -> Any:
        from megatron_cg.compiled.region import Region

        region = function()
        if not isinstance(region, Region):
            kind = type(region).__name__
            raise MegatronCGError(f"{text} returned {kind}, not a {Region.__module__}.Region")
        return region

    return build
