"""The symbols of other packages that our modules rely on, from the tuples ``RELIES_ON``."""

from __future__ import annotations

import importlib

from megatron_cg.tools.doctor.relied_on import modules_that_rely
from tools.generated.tables import code, table

_HEAD = ("symbol", "what it is to us", "names it must have", "our modules")
_COPY = ("megatron.core.distributed.fsdp.src.megatron_fsdp.", "megatron_fsdp.")
"""Megatron-FSDP in megatron-core, and as a package of its own."""


def relied_on() -> str:
    """A heading for each package, and a row for each symbol and purpose."""
    packages: dict[str, dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]]] = {}
    for module in modules_that_rely():
        for symbol in importlib.import_module(module).RELIES_ON:
            copied = symbol.path.startswith(_COPY[0])
            package = "megatron-fsdp" if copied else symbol.distribution
            key = symbol.path.replace(*_COPY), symbol.expected
            names, users = packages.setdefault(package, {}).setdefault(key, ({}, {}))
            names |= dict.fromkeys((*symbol.parameters, *symbol.attributes))
            users |= dict.fromkeys([module.removeprefix("megatron_cg.")])
    parts: list[str] = []
    for package, rows in sorted(packages.items()):
        cells = (
            (code(path), expected, " ".join(map(code, names)) or "—", " ".join(map(code, users)))
            for (path, expected), (names, users) in sorted(rows.items())
        )
        parts += [f"### {package}", table(_HEAD, cells)]
    return "\n\n".join(parts)
