"""Phase 1 of capture: take hooks off modules and parameters, and put them back exactly.

Note [Registries are emptied, never replaced]
    A ``RemovableHandle`` holds a weak reference to the very dict that its hook is in
    (torch 2.11, ``torch/utils/hooks.py``). A new dict would leave every handle that somebody
    keeps pointing nowhere, and its ``remove()`` would do nothing. So both detaching and
    restoring change the contents of the same dict objects, in place. The autograd engine holds a
    parameter's dicts in the same way.

What is restored is never what phase 2 works on: a snapshot owns copies of its own, made before
anything is cleared and not handed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron_cg.hooks.hook_records import FLAG_REGISTRIES, HookKind, HookRecord, module_hooks

_MODULE_REGISTRIES = (*(kind.value for kind in HookKind), *FLAG_REGISTRIES)
_PARAMETER_REGISTRIES = ("_post_accumulate_grad_hooks", "_backward_hooks")


class HookSnapshot:
    """All hooks of one module (not of its children), as they were when the snapshot was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._saved: dict[str, list[tuple[int, Any]]] = {
            name: list(getattr(module, name).items()) for name in _MODULE_REGISTRIES
        }
        self._is_full_backward_hook = module._is_full_backward_hook
        self.records: tuple[HookRecord, ...] = tuple(module_hooks(module))

    @property
    def module(self) -> nn.Module:
        """The module whose hooks these are."""
        return self._module

    def clear(self) -> None:
        """Take every hook off the module. The snapshot keeps what :meth:`restore` gives back."""
        for name in _MODULE_REGISTRIES:
            getattr(self._module, name).clear()
        self._module._is_full_backward_hook = None

    def restore(self) -> None:
        """Put the identical hooks back in the identical order, flags too. Safe to run twice."""
        for name, items in self._saved.items():
            registry = getattr(self._module, name)
            registry.clear()
            registry.update(items)
        self._module._is_full_backward_hook = self._is_full_backward_hook


class ParameterHookSnapshot:
    """The hooks that autograd runs for given parameters: after accumulation, and on gradients.

    During warmup and capture they must stay quiet, or gradients of made-up inputs are reduced
    over all ranks (Megatron-FSDP's ``_process_post_backward_gradients`` is one of them).
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._saved: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []
        for parameter in parameters:
            for name in _PARAMETER_REGISTRIES:
                registry = getattr(parameter, name, None)
                if registry:
                    self._saved.append((registry, list(registry.items())))

    def __len__(self) -> int:
        return sum(len(items) for _, items in self._saved)

    def clear(self) -> None:
        """Take the hooks off."""
        for registry, _ in self._saved:
            registry.clear()

    def restore(self) -> None:
        """Put the identical hooks back in the identical order. Safe to run twice."""
        for registry, items in self._saved:
            registry.clear()
            registry.update(items)
