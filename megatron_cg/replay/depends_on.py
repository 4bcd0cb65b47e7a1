"""What one graph depends on: a table whose rows are compared before each replay.

A graph holds addresses, and the operations that Python code led to when it was captured. An eager
pass follows whatever has changed since; a replay does not. The rows are what the capture observed
(``capture/observer.py``), the cheap ones first: inputs (``guard.py``), modes, objects, key
sets, frozen parameters and memory (``guard.py``). ``docs/how-it-works.md`` lists them.

Note [The same object, or the same value]
    A row is compared by identity first, at about 40 ns. A plain value that was set again to the
    same value, also of a container, is the same (``plain.py``). Containers may be changed in
    place, so their contents are compared too, by identity first as well.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from megatron_cg.hooks import HookKind
from megatron_cg.replay.guard import CAUSE, Addresses, Inputs, Mismatch, described
from megatron_cg.replay.plain import Contents, is_container, is_plain, same_value
from megatron_cg.upstream.symbols import Symbol

GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Registries of hooks on every module; torch 2.11, ``torch/nn/modules/module.py``."""
RELIES_ON = tuple(
    Symbol(f"torch.nn.modules.module:{name}", "hooks on every module") for name in GLOBAL_HOOKS
)

_REPLACED = (
    "It was replaced after capture, and the graph still uses the old one. Replace it before "
    "training begins, or delete the graphs and capture again."
)
_CAUSES = {
    "training": "It was switched alone, but the graph would run it in the old mode. Switch the "
    "whole model with model.train() and model.eval().",
    "state": "Python code of the unit reads it, and a replay runs no Python. Set it before "
    "training begins, or keep it in a tensor that is written in place.",
    "frozen": "The graph computes no gradient for a weight that was frozen at capture, and code of "
    "the unit may ask. Set requires_grad before training begins, or capture again.",
    "autocast": "The graph computes in the precision of capture. Keep one torch.autocast around "
    "the same passes in all steps, with Megatron none, or train without graphs.",
    "autocast cache": "The graph casts a weight once for all its uses, or for each, as at capture. "
    "Keep cache_enabled of torch.autocast in all steps.",
    "determinism": "The graph holds the kernels of capture. Set it before training begins.",
    "default dtype": "The graph makes tensors of the dtype of capture. Set it before training "
    "begins.",
    "fp8": "The graph quantizes as it did at capture. Keep one FP8 format and recipe for the "
    "whole run, and call the layer inside Megatron's own FP8 context.",
    "sharing": "Without a view, autograd sums and torch.autocast casts together with uses outside "
    "of the layer. Keep a full backward hook on it, or remove it before training begins.",
    "switches": CAUSE,
    "hooks": "A replay runs no Python of the modules inside the graph, so such a hook is not "
    "called. Put it on the layer itself, where it runs around every replay.",
}
_MODES = ("autocast", "autocast cache", "determinism", "default dtype", "fp8")


@dataclass(frozen=True)
class Entry:
    """One object that must stay the same, or plain value."""

    holder: Any
    """A dictionary, or another object whose ``get(key)`` returns the object or None."""
    key: Any
    clause: str
    what: str
    """What it is, in words."""


@dataclass(frozen=True)
class KeySet:
    """A dictionary of a module to which nothing may be added."""

    keys: Mapping[Any, Any]
    clause: str
    what: str
    reads: Collection[str] | None = None
    """The keys that matter; None means all."""


class Hooks:
    """Since a capture, no hook was added to a module inside the graph or removed from one.

    To be made while the unit's hooks are installed. Its own run around the replay and may change,
    but for one of ``register_backward_hook``. So will those inside that are ``moved``.
    """

    def __init__(
        self,
        layer: nn.Module,
        graphed: Iterable[nn.Module],
        moved: Callable[[Callable[..., Any]], bool] = lambda _hook: False,
    ) -> None:
        self._layer = layer
        names = {id(module): name for name, module in layer.named_modules()}
        registries = [
            (getattr(module, kind.value), names.get(id(module), type(module).__name__))
            for module in graphed
            for kind in HookKind
            if module is not layer
        ]
        registries += [(getattr(torch_module, name), f"torch's {name}") for name in GLOBAL_HOOKS]
        # Most registries are empty, and any() over empty dictionaries is the cheapest check.
        self._empty = [(r, name) for r, name in registries if all(map(moved, r.values()))]
        self._quiet = [registry for registry, _ in self._empty]
        quiet = set(map(id, self._quiet))
        self._kept = [(r, tuple(r), name) for r, name in registries if id(r) not in quiet]
        of_layer = (layer._backward_hooks, layer._backward_pre_hooks)
        self._viewing = of_layer if any(of_layer) else None
        """The layer's backward hooks, for which torch makes views of its inputs."""

    def broken(self) -> Mismatch | None:
        """The first module whose hooks have changed."""
        if any(self._quiet):
            name = next(name for registry, name in self._empty if registry)
            return _mismatch("hooks", f"module {name}", "without hooks", "with a hook")
        for registry, keys, name in self._kept:
            if tuple(registry) != keys:
                was, now = f"with {len(keys)} hooks", f"with {len(registry)} others"
                return _mismatch("hooks", f"module {name}", was, now)
        if self._viewing is not None and not any(self._viewing):
            subject = "what makes views of the layer's inputs"
            return _mismatch("sharing", subject, "a backward hook", "none")
        if self._layer._is_full_backward_hook is False:
            was = "without register_backward_hook"
            return _mismatch("hooks", "module the layer", was, "with one")
        return None


class DependsOn:
    """The table of one graph.

    The modes must now be those of forward passes, but for the backend's state of numerics, such as
    TE's FP8 recipe: that of capture is ``captured_numerics``, and ``numerics`` returns the current
    one. ``autocast`` is :func:`autocast_of` backward passes.
    """

    def __init__(
        self,
        inputs: Inputs,
        addresses: Addresses,
        *,
        objects: Iterable[Entry],
        key_sets: Iterable[KeySet],
        hooks: Hooks,
        frozen: Iterable[tuple[nn.Parameter, str]],
        captured_numerics: Any,
        numerics: Callable[[], Any],
        device_type: str,
        autocast: torch.dtype | None,
    ) -> None:
        self.inputs, self.addresses = inputs, addresses
        self._entries = tuple(objects)
        self._objects = [(e.holder, e.key, e.holder.get(e.key)) for e in self._entries]
        containers = {
            number: Contents(value)
            for number, (_, _, value) in enumerate(self._objects)
            if is_container(value)
        }
        self._contents = {n: one for n, one in containers.items() if one.can_change}
        self._key_sets = list(key_sets)
        self._keys = [key_set.keys for key_set in self._key_sets]
        self._sizes = [len(keys) for keys in self._keys]
        self._known = [frozenset(keys) for keys in self._keys]
        self._hooks = hooks
        self._frozen = [(one, name, one.requires_grad) for one, name in frozen]
        self._device_type, self._autocast = device_type, autocast
        self._numerics = numerics
        self._modes = (*self._read_modes()[:-1], captured_numerics)

    def broken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """What forbids a forward replay with these arguments, or None."""
        mismatch = self.inputs.broken(args, kwargs)
        if mismatch is None and (now := self._read_modes()) != self._modes:
            mismatch = self._other_mode(now)
        return mismatch or self._broken_object() or self.addresses.broken(forward=True)

    def broken_in_backward(self) -> Mismatch | None:
        """What forbids the backward replay that is about to begin, or None."""
        if (now := autocast_of(self._device_type)) != self._autocast:
            subject = f"torch.autocast for {self._device_type} in the backward pass"
            return _mismatch("autocast", subject, _switch(self._autocast), _switch(now))
        return self.addresses.broken(forward=False)

    def _read_modes(self) -> tuple[Any, ...]:
        """In the order of ``_MODES``: what Python code follows, and a replay does not."""
        return (
            autocast_of(self._device_type),
            torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            self._numerics(),
        )

    def _broken_object(self) -> Mismatch | None:
        for number, (holder, key, same) in enumerate(self._objects):
            if holder.get(key) is not same and (other := self._other_object(number)) is not None:
                return other
        for number, contents in self._contents.items():
            value = self._objects[number][2]
            if not contents.are_in(value):
                return self._changed(number, value, "with other contents")
        if list(map(len, self._keys)) != self._sizes and (other := self._other_keys()) is not None:
            return other
        for parameter, name, needs in self._frozen:
            if parameter.requires_grad is not needs:
                before, now = ("with", "without") if needs else ("without", "with")
                return _mismatch("frozen", name, f"{before} requires_grad", f"{now} it")
        return self._hooks.broken()

    def _other_mode(self, now: tuple[Any, ...]) -> Mismatch | None:
        for name, before, after in zip(_MODES, self._modes, now, strict=True):
            if before != after:
                autocast = f"torch.autocast for {self._device_type}"
                subject = {"autocast": autocast, "fp8": "the FP8 state"}.get(name, name)
                return _mismatch(name, subject, _switch(before), _switch(after))
        return None

    def _other_object(self, number: int) -> Mismatch | None:
        """Whether it matters that an object is another one."""
        holder, key, same = self._objects[number]
        now, contents = holder.get(key), self._contents.get(number)
        # A container may have been changed before it was replaced: its contents at capture count.
        is_same = same_value(same, now) if contents is None else contents.are_in(now)
        if is_same:
            self._objects[number] = holder, key, now
            return None
        return self._changed(number, now, _named(now))

    def _changed(self, number: int, now: Any, actual: str) -> Mismatch:
        entry, same = self._entries[number], self._objects[number][2]
        if entry.clause == "training":
            return _mismatch("training", entry.what, _mode(same), _mode(now))
        if entry.clause == "switches":
            return _mismatch(entry.clause, entry.what, same, now)
        if entry.clause == "state" and is_plain(same):
            return _mismatch(entry.clause, entry.what, _named(same), _named(now))
        expected = f"the {type(same).__name__} that was captured"
        if type(same) is type(now) and actual == _named(now):
            actual = f"another {type(now).__name__}"
        return _mismatch(entry.clause, entry.what, expected, actual)

    def _other_keys(self) -> Mismatch | None:
        for number, key_set in enumerate(self._key_sets):
            if len(key_set.keys) == self._sizes[number]:
                continue
            changed = self._known[number] ^ set(key_set.keys)
            named = sorted(str(k) for k in changed if key_set.reads is None or k in key_set.reads)
            if named:
                is_there = named[0] in key_set.keys
                was, now = ("absent", "there") if is_there else ("there", "absent")
                return _mismatch(key_set.clause, f"{key_set.what}{named[0]}", was, now)
            self._sizes[number], self._known[number] = len(key_set.keys), frozenset(key_set.keys)
        return None


def autocast_of(device_type: str) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` now; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def entries_of(layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Entry]:
    """The modules, parameters and buffers of ``graphed``, inside the graph of ``layer``."""
    entries: list[Entry] = []
    inside = {id(module) for module in graphed}
    for path, owner in layer.named_modules():
        prefix = f"{path}." if path else ""
        if id(owner) in inside or owner is layer:
            mode = f"the mode of a {type(owner).__name__}"
            entries.append(Entry(vars(owner), "training", "training", mode))
        entries += [
            Entry(owner._modules, name, "module", f"module {prefix}{name}")
            for name, child in owner._modules.items()
            if id(child) in inside
        ]
        if id(owner) not in inside:
            continue
        for clause, held in (("parameter", owner._parameters), ("buffer", owner._buffers)):
            entries += [Entry(held, name, clause, f"{clause} {prefix}{name}") for name in held]
        if owner is not layer:  # the replay replaces the layer's own forward
            entries.append(Entry(vars(owner), "forward", "forward", f"forward of {path}"))
    # A compiled module has its mode, as all else, in the module below it.
    return [e for e in entries if e.clause != "training" or "training" in e.holder]


def frozen_of(
    layer: nn.Module, graphed: Iterable[nn.Module], *, asked: bool
) -> list[tuple[nn.Parameter, str]]:
    """The parameters inside the graph that must go on to need no gradient, by name.

    The reverse is allowed: a gradient that the graph computes and nobody needs is discarded. But
    all must stay as they are if code is ``asked`` to do something else then.
    """
    names = {id(module): f"{name}." if name else "" for name, module in layer.named_modules()}
    return [
        (parameter, f"parameter {names.get(id(module), '')}{name}")
        for module in graphed
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if asked or not parameter.requires_grad
    ]


def _mismatch(clause: str, subject: str, expected: str, actual: str) -> Mismatch:
    return Mismatch(clause, subject, expected, actual, _CAUSES.get(clause, _REPLACED))


def _named(value: Any) -> str:
    return "none" if value is None else str(getattr(value, "name", "")) or described(value)


def _switch(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else str(value)


def _mode(training: Any) -> str:
    return "training" if training else "evaluation"
