"""Looks up every symbol of another package that a module of this one relies on.

The modules declare them in a tuple ``RELIES_ON`` (see ``megatron_cg/upstream/symbols.py``). It is
found in the sources, so there is no second list to maintain.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from megatron_cg.arguments.schema import NATIVE, TAPE
from megatron_cg.upstream.symbols import Symbol, installed_version

_DECLARED = re.compile(r"^RELIES_ON\b", re.MULTILINE)
_PACKAGE = Path(__file__).resolve().parents[2]
_OF_THE_TAPE = ("megatron_cg.backends.tape.", "megatron_cg.tools.cpu.")
_NOT_USED = {
    TAPE: ("megatron_cg.backends.te.",),
    NATIVE: (*_OF_THE_TAPE, "megatron_cg.backends.te.te_"),
}
"""Modules that a backend has no use for. With ``native``, TE's layers may be in the model."""


def modules_that_rely(package: Path = _PACKAGE) -> list[str]:
    """Names of the modules below ``package`` with a ``RELIES_ON``, sorted."""
    files = [p for p in package.rglob("*.py") if _DECLARED.search(p.read_text(encoding="utf-8"))]
    names = (".".join(path.relative_to(package.parent).with_suffix("").parts) for path in files)
    return sorted(name.removesuffix(".__init__") for name in names)


def look_up(backend: str, package: Path = _PACKAGE) -> list[dict[str, Any]]:
    """Find each symbol that a run with ``backend`` needs, in installed packages.

    Returns one dictionary per symbol. ``error`` is None if it is as expected. ``unknown`` is a text
    if it is a function that we replace and its body is not one that we know. ``skipped``: the
    package is not installed. A module that cannot be imported has one entry, with its own name.
    """
    rows: list[dict[str, Any]] = []
    for module in modules_that_rely(package):
        if module.startswith(_NOT_USED.get(backend, _OF_THE_TAPE)):
            continue
        try:
            symbols: tuple[Symbol, ...] = importlib.import_module(module).RELIES_ON
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            rows.append(_row(module, "megatron-cg", module, error=text))
            continue
        for symbol in symbols:
            # The tape replaces TE, whether it is installed or not.
            if backend != TAPE or symbol.distribution != "transformer-engine":
                state = _state(symbol) | {"replaced": bool(symbol.fingerprints)}
                rows.append(_row(module, symbol.distribution, symbol.path, **state))
    return rows


def _row(module: str, package: str, symbol: str, **state: Any) -> dict[str, Any]:
    row = {"module": module, "package": package, "symbol": symbol, "replaced": False}
    return {**row, "error": None, "unknown": None, "skipped": False, **state}


def _state(symbol: Symbol) -> dict[str, Any]:
    if symbol.distribution != "megatron-core" and installed_version(symbol.distribution) is None:
        return {"skipped": True}
    try:
        symbol.find()
        return {"unknown": symbol.unknown_body()}
    except Exception as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        return {"error": f"{type(error).__name__}: {error}{cause}"}
