"""Symbols of Megatron-FSDP, the roles of its hooks, and TE's capture-time hooks and their order.

Contract of TE >= 2.19 (``transformer_engine/pytorch/graph.py``,
``_canonicalize_capture_time_hooks`` and ``_run_capture_time_hooks``): each callable has one dict
with the keys below, and each value is ``{id: fn}``. TE calls every ``fn`` as ``fn(module)`` outside
of the graph, and ``fn`` must return None.

Note [Wrappers are withheld]
    Two forward hooks of Megatron-FSDP exist only to reach autograd: one inserts a Function in front
    of the unit, the other registers a multi-grad hook on its output. A graph would record what they
    insert. So TE gets the handlers inside them, each in the backward phase that it was written for.

Source of the order: ``_make_graphed_callables`` of transformer-engine 2.20.2 (``graph.py``). It
runs all forward passes and then all backward passes in reverse, ``num_warmup_iters`` times to warm
up, and once more to capture. The captured code does not affect this order.

Note [A failed rank runs the rest]
    Megatron-FSDP's hooks issue all-gathers. If one rank fails, the others run all their hooks and
    vote only after that. So the failed rank runs all remaining hooks in the same order, without the
    modules' work, and then votes. With tensor or context parallelism inside the captured region,
    other ranks wait in their modules' collectives, and the vote ends by its timeout.

Note [Around a pass]
    ``begun`` is called after the hooks that come before a pass, and ``ended`` before those that
    follow it. So neither sees what hooks do. A failed rank that runs only the remaining hooks has
    no passes, and calls neither.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from megatron_cg import errors
from megatron_cg.hooks import HookKind, HookRecord, describe, innermost, is_idle, module_hooks
from megatron_cg.replay.unit import ManualHook, Unit
from megatron_cg.upstream.symbols import Symbol, changed, installed_version

if TYPE_CHECKING:
    from megatron_cg.backends.base import CaptureRequest

PLACES = ("megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp")
"""The packages that ship it."""


def fsdp_class(name: str, *attributes: str) -> tuple[Symbol, ...]:
    """A class of Megatron-FSDP that has these attributes, in each package that ships it."""
    return fsdp_function(name, "a class of Megatron-FSDP", attributes=attributes)


def fsdp_function(
    path: str, expected: str, *fingerprints: str, **more: tuple[str, ...]
) -> tuple[Symbol, ...]:
    """A function of Megatron-FSDP, in each package that ships it; see :class:`Symbol`."""
    is_there = path.startswith(("MegatronFSDP", "fp8_", "_replace_"))
    at = f"{'megatron_fsdp' if is_there else 'param_and_grad_buffer'}:{path}"
    more["fingerprints"] = fingerprints
    return tuple(Symbol(f"{one}.{at}", expected, **more) for one in PLACES)


def fsdp_v2(
    path: str, expected: str, *attributes: str, fingerprints: tuple[str, ...] = ()
) -> tuple[Symbol, ...]:
    """A class or function of Megatron-FSDP v2, by its path below ``experimental``."""
    more = {"attributes": attributes, "fingerprints": fingerprints}
    return tuple(Symbol(f"{one}.experimental.{path}", expected, **more) for one in PLACES)


def unsharded_parameters(group: Any) -> list[nn.Parameter]:
    """What a group sets on its modules while it is gathered."""
    if hasattr(group, "unsharded_parameters"):
        return [*group.unsharded_parameters]
    return [parameter.unsharded for parameter in group.fsdp_parameters]  # megatron-core 0.20


_PACKAGES = {"megatron.core.distributed.fsdp": "megatron-core", "megatron_fsdp": "megatron-fsdp"}
HOOKS_SCOPE = "MegatronFSDP._register_fsdp_hooks.<locals>."
"""How the names of functions begin that Megatron-FSDP defines where it registers its hooks."""
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
    for symbol in fsdp_function(HOOKS_SCOPE + name, "a hook of Megatron-FSDP")
)


def fsdp_package_of(fn: Callable[..., Any]) -> str | None:
    """The distribution of the Megatron-FSDP that made ``fn``, or None if neither did."""
    inner = innermost(fn)
    home = getattr(inner, "__module__", None) or type(inner).__module__
    found = (name for package, name in _PACKAGES.items() if f"{home}.".startswith(f"{package}."))
    return next(found, None)


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
        if qualified == HOOKS_SCOPE + name and record.kind is kind:
            return role
    raise _unknown(record, distribution, "its name or registry is not one that is known")


def wrapped_handler(record: HookRecord, role: FsdpRole) -> Callable[..., Any]:
    """The backward handler inside a wrapper of this role.

    Raises UnknownFsdpHookError if the wrapper has no handler.
    """
    handler: Callable[..., Any] | None = None
    if role is FsdpRole.WRAPS_PRE_BACKWARD:
        variables = inspect.getclosurevars(innermost(record.fn)).nonlocals
        handler = variables.get("custom_backward_handler")
    elif isinstance(record.fn, partial) and record.fn.args:
        handler = record.fn.args[0]
    if not callable(handler):
        distribution = fsdp_package_of(record.fn) or ""
        raise _unknown(record, distribution, "the backward handler it wraps cannot be found")
    return handler


def _unknown(record: HookRecord, distribution: str, why: str) -> errors.UnknownFsdpHookError:
    version = installed_version(distribution) or "unknown version"
    return errors.UnknownFsdpHookError(
        f"{distribution} {version} put the hook {describe(record.fn)} into {record.kind.value}, "
        f"and {why}. Running it in the wrong phase gives wrong gradients without an error, so "
        "capture stops here. Install a version that megatron-cg doctor knows. "
        + errors.say(errors.WITHOUT_GRAPHS)
    )


CaptureTimeHook = Callable[[nn.Module], None]
CaptureTimeHooks = dict[str, dict[int, CaptureTimeHook]]

CAPTURE_TIME_KEYS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True)
class UnitHooks:
    capture_time: CaptureTimeHooks
    before_replay: tuple[ManualHook, ...] = ()
    """Unshard hooks of modules inside the graph, as (fn, its arguments). They run before each
    replay, because a replay runs no Python of these modules."""


def unit_hooks(unit: Unit) -> UnitHooks:
    """The current hooks of a unit and of the modules in it, sorted into TE's phases.

    Raises UnknownFsdpHookError, and HookError for a user's that would not run as intended.
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
                if getattr(innermost(fn), "__qualname__", "") != HOOKS_SCOPE + "_root_pre_backward":
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
        raise errors.HookError(
            f"{name}: {describe(record.fn)} was registered with register_backward_hook, which "
            "uses the autograd node of the module's last operation. After capture that is the "
            "graph's node, so the hook would get other gradients. Register it with "
            f"register_full_backward_hook, or {errors.say(errors.LEAVE_LAYER_OUT)}."
        )


def never_called(name: str, module: nn.Module, record: HookRecord) -> errors.HookError:
    """The error for a user's hook on a module inside the graph of the unit ``name``."""
    return errors.HookError(
        f"{name}: {describe(record.fn)} is a {record.kind.value} hook on a {type(module).__name__} "
        "inside the part that becomes a CUDA graph. A replay runs no Python of that module, so the "
        "hook would no longer run after capture. Put it on the layer itself, where it runs around "
        f"every replay, remove it, or {errors.say(errors.LEAVE_LAYER_OUT)}."
    )


_AFTER_A_PASS = ("forward_hooks", "backward_hooks")
_OF_FORWARD, _OF_BACKWARD = CAPTURE_TIME_KEYS[:2], CAPTURE_TIME_KEYS[2:]

AroundPass = Callable[[int, bool, bool], None]
"""Takes the index of the callable, whether the pass is a forward one, and whether it warms up."""


class OutOfStepError(errors.CaptureError):
    """A rank can no longer issue the same collectives as the others, and must not continue."""


class HookOrder:
    """Every call of a capture-time hook from the first warmup to the last backward capture.

    The backend gets ``wrapped`` instead of the request's hooks, so that each call is checked.
    ``begun`` and ``ended`` are called around each pass; see Note [Around a pass].
    """

    def __init__(
        self,
        request: "CaptureRequest",
        *,
        begun: AroundPass = lambda _layer, _forward, _warmup: None,
        ended: AroundPass = lambda _layer, _forward, _warmup: None,
    ) -> None:
        layers = range(len(request.callables))
        forward = [(layer, key) for layer in layers for key in _OF_FORWARD]
        backward = [(layer, key) for layer in reversed(layers) for key in _OF_BACKWARD]
        self._entries = [*forward, *backward] * (request.warmups + 1)
        self.warmup_passes = 2 * len(layers) * request.warmups
        self._position = 0
        self._raised = ""
        self._request, self._hooks = request, request.hooks
        self._begun, self._ended = begun, ended
        # One function per key, even without hooks, so that every call is checked.
        self.wrapped: list[CaptureTimeHooks] = [
            {key: {0: partial(self._called, layer, key)} for key in CAPTURE_TIME_KEYS}
            for layer in layers
        ]

    @property
    def finished(self) -> bool:
        return self._position == len(self._entries)

    @property
    def under_way(self) -> tuple[int, bool] | None:
        """The callable that runs a pass now, and whether it is a backward; None between passes."""
        if self.finished or self._position == 0:
            return None
        layer, key = self._entries[self._position]
        return (layer, key == "backward_hooks") if key in _AFTER_A_PASS else None

    def check_finished(self) -> None:
        if not self.finished:
            raise self._other_order("nothing")

    def run_rest(self) -> None:
        """Run all hooks that have not run yet; see Note [A failed rank runs the rest].

        Raises OutOfStepError if a hook raises now or raised during capture: it may have issued its
        collectives, and would issue them twice if it ran again.
        """
        cause: Exception | None = None
        try:
            while not self.finished and not self._raised:
                layer, key = self._entries[self._position]
                self._run(layer, key, self._request.callables[layer])
        except Exception as error:
            cause = error
        if self._raised:
            layer, key = self._entries[self._position]
            raise OutOfStepError(
                f"one of the {key} of {self._request.label(layer)} raised {self._raised}. So this "
                "rank may have left out collectives that the other ranks wait for, and training "
                "cannot go on. " + errors.say(errors.WITHOUT_GRAPHS)
            ) from cause

    def _called(self, layer: int, key: str, module: nn.Module) -> None:
        if self.finished or self._entries[self._position] != (layer, key):
            raise self._other_order(f"{key} of {self._request.label(layer)}")
        is_forward, is_warmup = key in _OF_FORWARD, self._position < 2 * self.warmup_passes
        if key in _AFTER_A_PASS:
            self._ended(layer, is_forward, is_warmup)
        self._run(layer, key, module)
        if key not in _AFTER_A_PASS:
            self._begun(layer, is_forward, is_warmup)

    def _run(self, layer: int, key: str, module: nn.Module) -> None:
        try:
            for hook in self._hooks[layer].get(key, {}).values():
                hook(module)
        except BaseException as error:
            self._raised = f"{type(error).__name__}: {error}"
            raise
        self._position += 1

    def _other_order(self, actual: str) -> errors.UpstreamChangedError:
        layer, key = self._entries[self._position] if not self.finished else (0, "")
        expected = f"{key} of {self._request.label(layer)}" if key else "no more hooks"
        return changed(
            "transformer-engine",
            "transformer_engine.pytorch.graph:_make_graphed_callables",
            f"at call {self._position + 1} of capture-time hooks, of {len(self._entries)}: "
            f"{expected}, where {actual} came",
        )
