"""The source that was traced, by checksum, so that edited code is not served by an old artifact."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

_OURS = __name__.rpartition(".")[0]
"""Replacements of this package, which need not be imported where code is loaded; the fingerprint
has this package's version."""

Source = tuple[str, int, int, str]
"""Module, first line, line after the last, SHA-256 of the lines."""


def traced_sources(compiled: Any) -> tuple[Source, ...]:
    """All pieces of source that Dynamo traced for a compiled function."""
    return tuple(
        sorted(
            (one.module, one.firstlineno, one.lastlineno, one.checksum)
            for one in compiled.source_info().inlined_sources
            if not one.module.startswith(_OURS)
        )
    )


def changed_sources(sources: Iterable[Source]) -> list[str]:
    """Those that are not the same in this process, in words. Imports nothing."""
    changed = []
    for name, first, end, checksum in sources:
        module = sys.modules.get(name)
        if module is None:
            changed.append(f"{name} is not imported")
            continue
        try:
            lines = inspect.getsourcelines(module)[0][first - 1 : end - 1]
        except (OSError, TypeError):
            changed.append(f"{name} has no source")
            continue
        if sha256("".join(lines).encode()).hexdigest() != checksum:
            changed.append(f"lines {first} to {end - 1} of {name} are different")
    return changed
