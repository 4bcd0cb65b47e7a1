"""The role of each hook of Megatron-FSDP, for both packages that ship it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

from megatron_cg.errors import UnknownFsdpHookError
from megatron_cg.fsdp.fsdp_symbols import fsdp_function
from megatron_cg.hooks.hook_records import HookKind, HookRecord, describe, innermost
from megatron_cg.upstream.symbols import installed_version

BACKWARD_HANDLER = "_cuda_graph_backward_handler"
"""Set on a forward pre-hook: the handler that it wraps, which runs after the unit's backward
(the sentinel that NVIDIA/Megatron-LM#4232 proposes)."""
BACKWARD_PRE_HANDLER = "_cuda_graph_backward_pre_handler"
"""Set on a forward hook: the handler that it wraps, which runs before the unit's backward
(same source)."""

_PACKAGES = {
    "megatron.core.distributed.fsdp": "megatron-core",
    "megatron_fsdp": "megatron-fsdp",
}
_SCOPE = "MegatronFSDP._register_fsdp_hooks.<locals>."


class FsdpRole(Enum):
    """What one of Megatron-FSDP's hooks does."""

    UNSHARD = "_pre_forward_param_unshard"
    RESHARD = "_post_forward"
    RELEASE_TRANSPOSE = "_release_module_fp8_transpose_cache"
    WRAPS_POST_BACKWARD = "_register_post_backward_hook"
    WRAPS_PRE_BACKWARD = "create_custom_backward_hook.<locals>.forward_hook"


RELIES_ON = tuple(
    symbol
    for name in (*(role.value for role in FsdpRole), "_root_pre_backward")
    for symbol in fsdp_function(_SCOPE + name, "a hook of Megatron-FSDP")
)

_KIND_OF_ROLE = {
    FsdpRole.UNSHARD: HookKind.FORWARD_PRE,
    FsdpRole.RESHARD: HookKind.FORWARD,
    FsdpRole.RELEASE_TRANSPOSE: HookKind.FORWARD,
    FsdpRole.WRAPS_POST_BACKWARD: HookKind.FORWARD_PRE,
    FsdpRole.WRAPS_PRE_BACKWARD: HookKind.FORWARD,
}


def fsdp_package_of(fn: Callable[..., Any]) -> str | None:
    """The distribution of the Megatron-FSDP that made ``fn``, or None if neither did."""
    inner = innermost(fn)
    home = getattr(inner, "__module__", None) or type(inner).__module__
    for prefix, distribution in _PACKAGES.items():
        if home == prefix or home.startswith(prefix + "."):
            return distribution
    return None


def classify(record: HookRecord) -> FsdpRole | None:
    """The role of a hook, or None for a hook that Megatron-FSDP did not make.

    Raises UnknownFsdpHookError if Megatron-FSDP made the hook, but the hook is not known here or is
    not in the registry of its role.
    """
    if record.kind is HookKind.FORWARD_PRE and hasattr(record.fn, BACKWARD_HANDLER):
        return FsdpRole.WRAPS_POST_BACKWARD
    if record.kind is HookKind.FORWARD and hasattr(record.fn, BACKWARD_PRE_HANDLER):
        return FsdpRole.WRAPS_PRE_BACKWARD
    distribution = fsdp_package_of(record.fn)
    if distribution is None:
        return None
    qualified = getattr(innermost(record.fn), "__qualname__", "")
    for role in FsdpRole:
        if qualified == _SCOPE + role.value and record.kind is _KIND_OF_ROLE[role]:
            return role
    raise _unknown(record, distribution, "its name or registry is not one that is known")


def wrapped_handler(record: HookRecord, role: FsdpRole) -> Callable[..., Any]:
    """The backward handler inside a wrapper: from its sentinel, else from the wrapper itself.

    Raises UnknownFsdpHookError if the wrapper has no handler.
    """
    distribution = fsdp_package_of(record.fn) or "a package that tags its hooks"
    if role is FsdpRole.WRAPS_POST_BACKWARD:
        handler = getattr(record.fn, BACKWARD_HANDLER, None)
        if handler is None and isinstance(record.fn, functools.partial) and record.fn.args:
            handler = record.fn.args[0]
    else:
        handler = getattr(record.fn, BACKWARD_PRE_HANDLER, None)
        if handler is None:
            variables = inspect.getclosurevars(innermost(record.fn)).nonlocals
            handler = variables.get("custom_backward_handler")
    if not callable(handler):
        raise _unknown(record, distribution, "the backward handler it wraps cannot be found")
    found: Callable[..., Any] = handler
    return found


def is_root_handler(handler: Callable[..., Any]) -> bool:
    """Whether a pre-backward handler is the root module's (``_root_pre_backward``).

    It queues a callback on the running backward pass, so it belongs in a training step and never
    in a capture.
    """
    return getattr(innermost(handler), "__qualname__", "") == _SCOPE + "_root_pre_backward"


def _unknown(record: HookRecord, distribution: str, why: str) -> UnknownFsdpHookError:
    version = installed_version(distribution) or "unknown version"
    return UnknownFsdpHookError(
        f"{distribution} {version} put the hook {describe(record.fn)} into {record.kind.value}, "
        f"and {why}. Running it in the wrong phase gives wrong gradients without an error, so "
        "capture stops here. Install a version that megatron-cg doctor knows, or run with "
        "--cuda-graph-impl none."
    )
