"""The objects that a graph was captured from: modules, parameters, buffers, and hooks.

A graph contains none of these, only their addresses and the operations that their code ran. If a
module, parameter or hook is installed later, an eager pass uses it and a replay does not.

Note [A table of what must be the same object]
    Parameters, buffers, submodules, tensors that are plain attributes and an overridden forward are
    entries of a module's own dictionaries. So one table of (dictionary, key, object) detects their
    replacement, at about 40 ns per entry. A tensor that the passes of the capture have replaced is
    a result of the module, such as its last loss, and not in the table. Hooks are checked
    separately: no hook may have been added or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from megatron_cg.hooks import HookKind
from megatron_cg.replay.guard.mismatch import Mismatch
from megatron_cg.upstream.symbols import Symbol

_GLOBAL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Registries of hooks on every module; torch 2.11, ``torch/nn/modules/module.py``."""
RELIES_ON = tuple(
    Symbol("torch", f"torch.nn.modules.module:{name}", "hooks on every module") for name in _GLOBAL
)

Entry = tuple[Mapping[Any, Any], Any, str, str]
"""(dictionary, key, clause, description of the object)."""


def entries(layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Entry]:
    """The entries that must stay the same objects.

    ``graphed`` are the modules of ``layer`` inside its graph.
    """
    found: list[Entry] = []
    inside = {id(module) for module in graphed}
    names = {id(module): name for name, module in layer.named_modules()}
    for owner in layer.modules():
        prefix = _prefix(names[id(owner)])
        found += [
            (owner._modules, name, "module", f"module {prefix}{name}")
            for name, child in owner._modules.items()
            if id(child) in inside
        ]
        if id(owner) not in inside:
            continue
        found += [
            (owner._parameters, name, "parameter", f"parameter {prefix}{name}")
            for name in owner._parameters
        ]
        found += [
            (owner._buffers, name, "buffer", f"buffer {prefix}{name}") for name in owner._buffers
        ]
        if owner is not layer:  # the replay replaces the layer's own forward
            found.append((vars(owner), "forward", "forward", f"forward of {prefix[:-1]}"))
    return found


def tensor_attributes(layer: nn.Module, graphed: Sequence[nn.Module]) -> list[Entry]:
    """The tensors that ``graphed`` hold as plain attributes, neither parameters nor buffers."""
    names = {id(module): _prefix(name) for name, module in layer.named_modules()}
    return [
        (vars(owner), name, "attribute", f"attribute {names[id(owner)]}{name}")
        for owner in graphed
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor)
    ]


class Objects:
    """The objects of :func:`entries`, and of a backend's own entries, are still the same."""

    def __init__(self, table: Iterable[Entry]) -> None:
        self._table = [
            (owner, key, owner.get(key), clause, what) for owner, key, clause, what in table
        ]

    def broken(self) -> Mismatch | None:
        """The first object that was replaced, added or removed."""
        for owner, key, same, clause, what in self._table:
            if owner.get(key) is not same:
                return Mismatch(
                    clause,
                    what,
                    f"the {type(same).__name__} that was captured",
                    f"another {type(owner.get(key)).__name__}",
                    "It was replaced after capture, and the graph still uses the old one. Replace "
                    "it before training begins, or delete the graphs and capture again.",
                )
        return None


class Hooks:
    """Since capture, no hook was added to a module inside the graph or removed from one.

    Args:
        layer: the unit; its own hooks run around the replay and may change.
        graphed: the modules inside its graph; a replay does not run their hooks.
    """

    def __init__(self, layer: nn.Module, graphed: Iterable[nn.Module]) -> None:
        self._layer = layer
        names = {id(module): name for name, module in layer.named_modules()}
        registries = [
            (getattr(module, kind.value), names.get(id(module), type(module).__name__))
            for module in graphed
            for kind in HookKind
            if module is not layer
        ]
        registries += [(getattr(torch_module, name), f"torch's {name}") for name in _GLOBAL]
        # Most registries are empty, and any() over empty dictionaries is the cheapest check.
        self._empty = [(registry, name) for registry, name in registries if not registry]
        self._quiet = [registry for registry, _ in self._empty]
        self._kept = [(r, tuple(r), name) for r, name in registries if r]

    def broken(self) -> Mismatch | None:
        """The first module whose hooks have changed."""
        if any(self._quiet):
            name = next(name for registry, name in self._empty if registry)
            return _hook(name, "without hooks", "with a hook")
        for registry, keys, name in self._kept:
            if tuple(registry) != keys:
                return _hook(name, f"with {len(keys)} hooks", f"with {len(registry)} others")
        if self._layer._is_full_backward_hook is False:
            return _hook("the layer", "without register_backward_hook", "with one")
        return None


def _hook(name: str, expected: str, actual: str) -> Mismatch:
    return Mismatch(
        "hooks",
        f"module {name}",
        expected,
        actual,
        "A replay runs no Python of the modules inside the graph, so such a hook is not called. "
        "Put it on the layer itself, where it runs around every replay.",
    )


def _prefix(name: str) -> str:
    return f"{name}." if name else ""
