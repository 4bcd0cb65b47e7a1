"""Phase 2 of capture: turns the hooks of a unit into TE's capture-time hooks.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_cg.errors import HookError
from megatron_cg.fsdp.roles import FsdpRole, classify, is_root_handler, wrapped_handler
from megatron_cg.hooks import HookKind, HookRecord, describe, module_hooks
from megatron_cg.replay.unit import ManualHook, Unit

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
                _place(phases, record, role, target)
                if target is not None and role is FsdpRole.UNSHARD:
                    before_replay.append((_adapter(record.fn, None, (), {}), (module,)))
            elif role is None and target is None:
                check_hook_of_unit(unit.layer, record, unit.name)
            elif role is None and is_inside:
                raise never_called(unit.name, module, record)
    return UnitHooks(phases, tuple(before_replay))


_PHASES: dict[FsdpRole, tuple[Any, ...]] = {
    FsdpRole.UNSHARD: ("forward_pre_hooks", (), {}),
    FsdpRole.RESHARD: ("forward_hooks", (), None),
    FsdpRole.RELEASE_TRANSPOSE: ("forward_hooks",),
    FsdpRole.WRAPS_POST_BACKWARD: ("backward_hooks",),
    FsdpRole.WRAPS_PRE_BACKWARD: ("backward_pre_hooks", None),
}
"""The key of each role, and what its hook or the handler inside gets after the module."""


def _place(
    phases: CaptureTimeHooks, record: HookRecord, role: FsdpRole, target: nn.Module | None
) -> None:
    """Add an FSDP hook, adapted to ``fn(module)``, under the key of its phase."""
    key, *arguments = _PHASES[role]
    fn = wrapped_handler(record, role) if key.startswith("backward") else record.fn
    if not is_root_handler(fn):
        phases[key][record.hook_id] = _adapter(fn, target, *arguments)


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
            "register_full_backward_hook, or leave the layer out of --cg-layers."
        )


def never_called(name: str, module: nn.Module, record: HookRecord) -> HookError:
    """The error for a user's hook on a module inside the graph of the unit ``name``."""
    return HookError(
        f"{name}: {describe(record.fn)} is a {record.kind.value} hook on a {type(module).__name__} "
        "inside the part that becomes a CUDA graph. A replay runs no Python of that module, so the "
        "hook would no longer run after capture. Put it on the layer itself, where it runs around "
        "every replay, remove it, or leave the layer out of --cg-layers."
    )
