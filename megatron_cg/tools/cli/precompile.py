"""What builds a layer for ``megatron-cg precompile``, and the call that compiles it."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
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
    Raises MegatronCGError if there is no such file or function, or the file cannot be imported.
    """
    file, _, name = text.rpartition(":")
    if not Path(file).is_file():
        raise MegatronCGError(f"{text} names no file and function: type FILE.py:FUNCTION")
    path = Path(file).resolve()
    others = [place for place in sys.path if Path(place).resolve() != path.parent]
    found = PathFinder.find_spec(path.stem, others)
    if path.stem in sys.stdlib_module_names or (found is not None and found.origin is not None):
        raise MegatronCGError(
            f"{file} has the name of another module, {path.stem}, which would be imported instead "
            "where the code is loaded: rename the file"
        )
    sys.path.insert(0, str(path.parent))
    with _running(file):
        module = importlib.import_module(path.stem)
    function = getattr(module, name, None)
    if not callable(function):
        raise MegatronCGError(f"{file} has no function {name}")

    def build() -> Any:
        from megatron_cg.compiled.region import Region

        with _running(file):
            region = function()
        if not isinstance(region, Region):
            kind = type(region).__name__
            raise MegatronCGError(f"{text} returned {kind}, not a {Region.__module__}.Region")
        return region

    return build


@contextmanager
def _running(file: str) -> Iterator[None]:
    """Turn what the code of the file raises in the block into one message."""
    try:
        yield
    except MegatronCGError:
        raise
    except (Exception, SystemExit) as error:  # If a signal ends it, main() says so.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        remedy = "the command imports the file and calls the function, so both must end normally"
        raise MegatronCGError(
            f"{file} raised {type(error).__name__}: {error} (line {frame.lineno} of "
            f"{frame.filename}): {remedy}"
        ) from error
