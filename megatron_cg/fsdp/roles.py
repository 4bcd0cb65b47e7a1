"""Symbols of Megatron-FSDP, the role of each of its hooks, and TE's capture-time hooks from these.

Contract of TE >= 2.19 (``transformer_engine/pytorch/graph.py``,
``_canonicalize_capture_time_hooks`` and ``_run_capture_time_hooks``): each callable has one dict
with the keys below, and each value is ``{id: fn}``. TE calls every ``fn`` as ``fn(module)`` outside
of the graph, and ``fn`` must return None.

Note [Wrappers are withheld]
    Two forward hooks of Megatron-FSDP exist only to reach autograd: one inserts a Function in front
    of the unit, the other registers a multi-grad hook on its output. If they ran at capture as
    forward hooks, they would act in the forward phase, and the graph would record what they insert.
    So TE never gets these wrappers. It gets the handlers inside them, each in the backward phase
    that the handler was written for.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from megatron_cg.errors import (
    LEAVE_LAYER_OUT,
    WITHOUT_GRAPHS,
    HookError,
    UnknownFsdpHookError,
    say,
)
from megatron_cg.hooks import HookKind, HookRecord, describe, innermost, is_idle, module_hooks
from megatron_cg.replay.unit import ManualHook, Unit
from megatron_cg.upstream.symbols import Symbol, installed_version

_PLACES = ("megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp")

_CLASSES = {
    "MegatronFSDP": "the wrapped model",
    "ParamAndGradBuffer": "the model's buffers",
    "ParameterGroup": "parameters in one bucket",
    "DataParallelBuffer": "one kind of weights or gradients",
    "FixedPoolAllocator": "buffers that stay in place",
    "AllGatherPipeline": "what gathers weights",
    "GradReducePipeline": "what reduces gradients",
    "BucketStatus": "how far a bucket is",
}


def fsdp_class(name: str, *attributes: str) -> tuple[Symbol, ...]:
    """A class of Megatron-FSDP that has these attributes, in each package that ships it."""
    return _in_both(name, _CLASSES[name], attributes=attributes)


def fsdp_function(
    path: str, expected: str, *parameters: str, fingerprints: tuple[str, ...] = ()
) -> tuple[Symbol, ...]:
    """A function of Megatron-FSDP, in each package that ships it; see :class:`Symbol`."""
    return _in_both(path, expected, parameters=parameters, fingerprints=fingerprints)


def fsdp_v2(
    path: str, expected: str, *attributes: str, fingerprints: tuple[str, ...] = ()
) -> tuple[Symbol, ...]:
    """A class or function of Megatron-FSDP v2, by its path below ``experimental``."""
    more = {"attributes": attributes, "fingerprints": fingerprints}
    return tuple(Symbol(f"{one}.experimental.{path}", expected, **more) for one in _PLACES)


def _in_both(path: str, expected: str, **more: tuple[str, ...]) -> tuple[Symbol, ...]:
    is_there = path.startswith(("MegatronFSDP", "fp8_"))
    module = "megatron_fsdp" if is_there else "param_and_grad_buffer"
    return tuple(Symbol(f"{package}.{module}:{path}", expected, **more) for package in _PLACES)


def unknown_bodies(symbols: Iterable[Symbol], fsdp: Any) -> list[str]:
    """Why our replacements of ``symbols`` may not be right for this object of Megatron-FSDP's.

    Does not check functions of modules that are not loaded, or of the other package of
    Megatron-FSDP.
    """
    own = type(fsdp).__module__
    reasons = []
    for symbol in symbols:
        module = symbol.path.partition(":")[0]
        other = any(
            module.startswith(f"{place}.") and not own.startswith(f"{place}.") for place in _PLACES
        )
        if module in sys.modules and not other:
            reasons.append(symbol.unknown_body())
    return [why for why in reasons if why is not None]


_PACKAGES = {"megatron.core.distributed.fsdp": "megatron-core", "megatron_fsdp": "megatron-fsdp"}
_SCOPE = "MegatronFSDP._register_fsdp_hooks.<locals>."
_NONE: dict[str, Any] = {}


class FsdpRole(Enum):
    """What one of Megatron-FSDP's hooks does: the function's name, and where it is registered.

    Then TE's key for its phase, and what it, or the handler inside it, gets after the module.
    """

    UNSHARD = ("_pre_forward_param_unshard", HookKind.FORWARD_PRE, "forward_pre_hooks", (), _NONE)
    RESHARD = ("_post_forward", HookKind.FORWARD, "forward_hooks", (), None)
    RELEASE_TRANSPOSE = ("_release_module_fp8_transpose_cache", HookKind.FORWARD, "forward_hooks")
    WRAPS_POST_BACKWARD = ("_register_post_backward_hook", HookKind.FORWARD_PRE, "backward_hooks")
    WRAPS_PRE_BACKWARD = (
        "create_custom_backward_hook.<locals>.forward_hook",
        HookKind.FORWARD,
        "backward_pre_hooks",
        None,
    )


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
        name, kind, *_ = role.value
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


def _unknown(record: HookRecord, distribution: str, why: str) -> UnknownFsdpHookError:
    version = installed_version(distribution) or "unknown version"
    return UnknownFsdpHookError(
        f"{distribution} {version} put the hook {describe(record.fn)} into {record.kind.value}, "
        f"and {why}. Running it in the wrong phase gives wrong gradients without an error, so "
        "capture stops here. Install a version that megatron-cg doctor knows. "
        + say(WITHOUT_GRAPHS)
    )


CaptureTimeHook = Callable[[nn.Module], None]
CaptureTimeHooks = dict[str, dict[int, CaptureTimeHook]]
"""TE's four keys, each ``{id: fn(module) -> None}``."""

CAPTURE_TIME_KEYS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True)
class UnitHooks:
    capture_time: CaptureTimeHooks
    before_replay: tuple[ManualHook, ...] = ()
    """Unshard hooks of modules inside the graph, as (fn, its arguments). They run before each
    replay, because a replay runs no Python of these modules."""


def unit_hooks(unit: Unit) -> UnitHooks:
    """The current hooks of a unit and of the modules in it, sorted into TE's phases.

    Changes nothing.

    Raises:
        UnknownFsdpHookError: a hook made by Megatron-FSDP is not known.
        HookError: a user's hook would not run as intended.
    """
    phases: CaptureTimeHooks = {key: {} for key in CAPTURE_TIME_KEYS}
    before_replay: list[ManualHook] = []
    for module in unit.layer.modules():
        target = None if module is unit.layer else module
        is_inside = module in unit.graphed
        for record in module_hooks(module):
            role = classify(record)
            if role is not None and (target is None or is_inside):
                _, _, key, *arguments = role.value
                fn = wrapped_handler(record, role) if key.startswith("backward") else record.fn
                # The root module's queues a callback on the running backward pass, so it belongs in
                # a training step and never in a capture.
                if getattr(innermost(fn), "__qualname__", "") != _SCOPE + "_root_pre_backward":
                    phases[key][record.hook_id] = _adapter(fn, target, *arguments)
                if target is not None and role is FsdpRole.UNSHARD:
                    before_replay.append((_adapter(record.fn, None, (), _NONE), (module,)))
            elif role is None and target is None:
                check_hook_of_unit(unit.layer, record, unit.name)
            elif role is None and is_inside and not is_idle(record.fn):
                raise never_called(unit.name, module, record)
    return UnitHooks(phases, tuple(before_replay))


def _adapter(fn: Callable[..., Any], target: nn.Module | None, *arguments: Any) -> CaptureTimeHook:
    """``fn(module, *arguments)`` without its result, as TE requires."""

    def capture_time_hook(module: nn.Module) -> None:
        fn(module if target is None else target, *arguments)

    return capture_time_hook


def check_hook_of_unit(unit: nn.Module, record: HookRecord, name: str) -> None:
    """Refuse the one kind of user's hook on a unit that would get wrong gradients at a replay.

    The others stay on the unit, and run around the replay.
    """
    if record.kind is HookKind.BACKWARD and unit._is_full_backward_hook is False:
        raise HookError(
            f"{name}: {describe(record.fn)} was registered with register_backward_hook, which "
            "uses the autograd node of the module's last operation. After capture that is the "
            "graph's node, so the hook would get other gradients. Register it with "
            f"register_full_backward_hook, or {say(LEAVE_LAYER_OUT)}."
        )


def never_called(name: str, module: nn.Module, record: HookRecord) -> HookError:
    """The error for a user's hook on a module inside the graph of the unit ``name``."""
    return HookError(
        f"{name}: {describe(record.fn)} is a {record.kind.value} hook on a {type(module).__name__} "
        "inside the part that becomes a CUDA graph. A replay runs no Python of that module, so the "
        "hook would no longer run after capture. Put it on the layer itself, where it runs around "
        f"every replay, remove it, or {say(LEAVE_LAYER_OUT)}."
    )
