"""Finds every symbol of another package that a module of this one relies on.

The modules declare them in a tuple ``RELIES_ON`` (see ``megatron_cg/upstream/symbols.py``). This
module finds the tuples in the sources, so there is no second list to maintain.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import NATIVE
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.tools.doctor.ask import TE
from megatron_cg.upstream.symbols import Symbol, installed_version

_DECLARED = re.compile(r"^RELIES_ON\b", re.MULTILINE)
_PACKAGE = Path(__file__).resolve().parents[2]
_FAST = "megatron_cg.fastpath"
_TE_ONLY = (
    "megatron_cg.backends.te.",
    f"{_FAST}.optimizer.adam",
    f"{_FAST}.heuristics",
    f"{_FAST}.gradients.detached",
    "megatron_cg.integrations.megatron.weight_gradients",
    "megatron_cg.moe.install",
)
_NOT_NATIVE = ("megatron_cg.backends.te.te_backend", "megatron_cg.backends.te.te_replay")
"""What captures by Transformer Engine. Its modules may still be in the model."""
_WITHOUT_GRAPHS = ("megatron_cg.compiled.together",)
"""Modules that a run with graphs does not use; they change other packages in their own block."""
_TAPE_ONLY = ("megatron_cg.backends.tape.", "megatron_cg.tools.cpu.")


def modules_that_rely(package: Path = _PACKAGE) -> list[str]:
    """Names of the modules below ``package`` with a ``RELIES_ON``, sorted."""
    names = []
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            path = Path(folder) / file
            if path.suffix == ".py" and _DECLARED.search(path.read_text(encoding="utf-8")):
                parts = path.relative_to(package.parent).with_suffix("").parts
                names.append(".".join(parts).removesuffix(".__init__"))
    return sorted(names)


def look_up(backend: str, package: Path = _PACKAGE) -> list[dict[str, Any]]:
    """Find each symbol that a run with ``backend`` needs, in installed packages.

    Returns one dictionary per symbol: ``module`` (ours), ``package``, ``symbol``, ``error`` and
    ``unknown``. ``error`` is None if the symbol is as expected. ``unknown`` is a text if the body
    of a function differs from the one that we replace. A module that cannot be imported has one
    entry, with its own name as the symbol. A symbol of a package that is not installed has
    ``skipped`` set.
    """
    found: list[dict[str, Any]] = []
    for module in _used(backend, package):
        try:
            symbols: tuple[Symbol, ...] = importlib.import_module(module).RELIES_ON
        except Exception as error:
            found.append(_row(module, "megatron-cg", module, error=_text(error)))
        else:
            found += [_row(module, s.distribution, s.path, **_looked_up(s)) for s in symbols]
    return found


def _looked_up(symbol: Symbol) -> dict[str, Any]:
    if symbol.distribution != "megatron-core" and installed_version(symbol.distribution) is None:
        return {"skipped": True}
    try:
        unknown = symbol.unknown_body() if symbol.fingerprints else None
        symbol.find()
    except UpstreamChangedError as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        return {"error": f"{error}{cause}"}
    except Exception as error:
        return {"error": _text(error)}
    return {"unknown": unknown}


def _row(module: str, package: str, symbol: str, **found: Any) -> dict[str, Any]:
    place = {"module": module, "package": package, "symbol": symbol}
    return {**place, "error": None, "skipped": False, "unknown": None, **found}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def taken_over(backend: str, package: Path = _PACKAGE) -> list[dict[str, str]]:
    """The functions of other packages whose work is done here while graphs live.

    They are the symbols with fingerprints, as far as the installed body is a known one. Returns one
    dictionary per function: ``package``, ``place``, ``by`` (our module) and ``when``. Raises what
    importing a module of ours raises.
    """
    return [
        {
            "package": symbol.path.partition(".")[0],
            "place": symbol.path.replace(":", "."),
            "by": module,
            "when": "graphs live",
        }
        for module in _used(backend, package)
        if module not in _WITHOUT_GRAPHS
        for symbol in importlib.import_module(module).RELIES_ON
        if symbol.fingerprints
        and installed_version(symbol.distribution) is not None
        and symbol.unknown_body() is None
    ]


def _used(backend: str, package: Path) -> list[str]:
    """The modules that a run with ``backend`` uses."""
    others = {TE: _TAPE_ONLY, NATIVE: (*_TAPE_ONLY, *_NOT_NATIVE)}.get(backend, _TE_ONLY)
    return [name for name in modules_that_rely(package) if not name.startswith(others)]
