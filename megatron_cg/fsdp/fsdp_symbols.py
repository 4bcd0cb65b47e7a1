"""The symbols of Megatron-FSDP that we rely on, in both packages that ship it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from megatron_cg.upstream.symbols import Symbol

_PLACES = (
    ("megatron-core", "megatron.core.distributed.fsdp.src.megatron_fsdp"),
    ("megatron-fsdp", "megatron_fsdp"),
)


def in_both(
    path: str,
    expected: str,
    *,
    parameters: tuple[str, ...] = (),
    attributes: tuple[str, ...] = (),
    fingerprints: tuple[str, ...] = (),
) -> tuple[Symbol, ...]:
    """The symbol ``<package of Megatron-FSDP>.<path>`` of each package; see :class:`Symbol`."""
    return tuple(
        Symbol(distribution, f"{package}.{path}", expected, parameters, attributes, fingerprints)
        for distribution, package in _PLACES
    )


def unknown_bodies(symbols: Iterable[Symbol], fsdp: Any) -> list[str]:
    """Why our replacements of ``symbols`` may not be right for this ``MegatronFSDP``.

    Does not check functions of modules that are not loaded, or of the other package of
    Megatron-FSDP.
    """
    own = type(fsdp).__module__
    found = []
    for symbol in symbols:
        module = symbol.path.partition(":")[0]
        other = any(
            module.startswith(f"{place}.") and not own.startswith(f"{place}.")
            for _, place in _PLACES
        )
        if module in sys.modules and not other:
            found.append(symbol.unknown_body())
    return [why for why in found if why is not None]
