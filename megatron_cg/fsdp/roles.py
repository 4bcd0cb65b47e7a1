"""The role of each hook of Megatron-FSDP, for both packages that ship it."""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

from megatron_cg.errors import UnknownFsdpHookError
from megatron_cg.fsdp.fsdp_symbols import fsdp_function
from megatron_cg.hooks import HookKind, HookRecord, describe, innermost
from megatron_cg.upstream.symbols import installed_version

_PACKAGES = {"megatron.core.distributed.fsdp": "megatron-core", "megatron_fsdp": "megatron-fsdp"}
_SCOPE = "MegatronFSDP._register_fsdp_hooks.<locals>."


class FsdpRole(Enum):
    """What one of Megatron-FSDP's hooks does: the function's name, and where it is registered."""

    UNSHARD = ("_pre_forward_param_unshard", HookKind.FORWARD_PRE)
    RESHARD = ("_post_forward", HookKind.FORWARD)
    RELEASE_TRANSPOSE = ("_release_module_fp8_transpose_cache", HookKind.FORWARD)
    WRAPS_POST_BACKWARD = ("_register_post_backward_hook", HookKind.FORWARD_PRE)
    WRAPS_PRE_BACKWARD = ("create_custom_backward_hook.<locals>.forward_hook", HookKind.FORWARD)


RELIES_ON = tuple(
    symbol
    for name in (*(role.value[0] for role in FsdpRole), "_root_pre_backward")
    for symbol in fsdp_function(_SCOPE + name, "a hook of Megatron-FSDP")
)


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
    distribution = fsdp_package_of(record.fn)
    if distribution is None:
        return None
    qualified = getattr(innermost(record.fn), "__qualname__", "")
    for role in FsdpRole:
        name, kind = role.value
        if qualified == _SCOPE + name and record.kind is kind:
            return role
    raise _unknown(record, distribution, "its name or registry is not one that is known")


def wrapped_handler(record: HookRecord, role: FsdpRole) -> Callable[..., Any]:
    """The backward handler inside a wrapper of this role.

    Raises UnknownFsdpHookError if the wrapper has no handler.
    """
    handler: Any = None
    if role is FsdpRole.WRAPS_PRE_BACKWARD:
        variables = inspect.getclosurevars(innermost(record.fn)).nonlocals
        handler = variables.get("custom_backward_handler")
    elif isinstance(record.fn, functools.partial) and record.fn.args:
        handler = record.fn.args[0]
    if not callable(handler):
        distribution = fsdp_package_of(record.fn) or ""
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
