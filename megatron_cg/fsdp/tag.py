"""Sentinels on the hooks that wrap backward handlers, for releases that do not set them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron_cg.fsdp.roles import (
    BACKWARD_HANDLER,
    BACKWARD_PRE_HANDLER,
    FsdpRole,
    classify,
    wrapped_handler,
)
from megatron_cg.hooks.hook_records import module_hooks
from megatron_cg.upstream.patch import set_attribute

_SENTINEL = {
    FsdpRole.WRAPS_POST_BACKWARD: BACKWARD_HANDLER,
    FsdpRole.WRAPS_PRE_BACKWARD: BACKWARD_PRE_HANDLER,
}


def tag_backward_wrappers(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Set the sentinel on every untagged wrapper on ``modules``; returns the undo.

    A wrapper that a newer Megatron has tagged is left unchanged. Raises UnknownFsdpHookError for a
    hook of Megatron-FSDP that is not known; nothing is tagged then.
    """
    found: list[tuple[Any, str, Callable[..., Any]]] = []
    for module in modules:
        for record in module_hooks(module):
            role = classify(record)
            name = _SENTINEL.get(role) if role is not None else None
            if name is not None and role is not None and not hasattr(record.fn, name):
                found.append((record.fn, name, wrapped_handler(record, role)))
    undo = ExitStack()
    for fn, name, handler in found:
        undo.callback(set_attribute(fn, name, handler))
    return undo.close
