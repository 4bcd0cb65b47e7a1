"""What we rely on in Megatron-FSDP, in both packages that ship it."""

from __future__ import annotations

from megatron_cg.versions import Symbol

_PLACES = (
    ("megatron-core", "megatron.core.distributed.fsdp.src.megatron_fsdp"),
    ("megatron-fsdp", "megatron_fsdp"),
)


def in_both(
    path: str, expected: str, *, parameters: tuple[str, ...] = (), attributes: tuple[str, ...] = ()
) -> tuple[Symbol, ...]:
    """The symbol ``<package of Megatron-FSDP>.<path>`` of each; see :class:`Symbol`."""
    return tuple(
        Symbol(distribution, f"{package}.{path}", expected, parameters, attributes)
        for distribution, package in _PLACES
    )
