"""Megatron's rules of a model, relaxed for what this package makes possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol

_RULES = Symbol(
    "megatron-core",
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    "Megatron's rules of a model",
)
RELIES_ON = (_RULES,)

Check = Callable[[Any, Callable[[Any], None]], None]
"""Takes a config and the rules; calls ``rules(config)``, on a config that it may change before."""


def relax_rules(check: Check) -> Callable[[], None]:
    """Let ``check`` apply Megatron's rules to configs that are made from now on.

    Returns the undo. Raises UpstreamChangedError if Megatron has no such rules.
    """
    rules = _RULES.find()

    def __post_init__(self: Any) -> None:
        check(self, rules)

    return put_over(*_RULES.place(), __post_init__)
