"""Phase 1 of capture: remove hooks from modules and parameters, and restore them exactly.

Note [Registries are emptied, never replaced]
    A ``RemovableHandle`` holds a weak reference to the dict that contains its hook (torch 2.11,
    ``torch/utils/hooks.py``). With a new dict, ``remove()`` of existing handles would do nothing.
    So hooks are removed and restored by changing the contents of the same dict objects, in place.
    The autograd engine holds a parameter's dicts in the same way.

A snapshot restores from its own copies. It makes them before anything is cleared and does not
expose them, so phase 2 cannot change them.
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
        self.module = module
        self._saved: dict[str, list[tuple[int, Any]]] = {
            name: list(getattr(module, name).items()) for name in _MODULE_REGISTRIES
        }
        self._is_full_backward_hook = module._is_full_backward_hook
        self.records: tuple[HookRecord, ...] = tuple(module_hooks(module))

    def clear(self) -> None:
        """Remove all hooks from the module; :meth:`restore` installs them again."""
        for name in _MODULE_REGISTRIES:
            getattr(self.module, name).clear()
        self.module._is_full_backward_hook = None

    def restore(self) -> None:
        """Restore the same hooks in the same order, with their flags. Safe to run twice."""
        for name, items in self._saved.items():
            registry = getattr(self.module, name)
            registry.clear()
            registry.update(items)
        self.module._is_full_backward_hook = self._is_full_backward_hook


class ParameterHookSnapshot:
    """The hooks that autograd runs for given parameters: after accumulation, and on gradients.

    They must not run during warmup and capture. Otherwise gradients of synthetic inputs would be
    reduced over all ranks (``_process_post_backward_gradients`` of Megatron-FSDP is such a hook).
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._saved: list[tuple[dict[int, Any], list[tuple[int, Any]]]] = []
        for parameter in parameters:
            for name in _PARAMETER_REGISTRIES:
                registry = getattr(parameter, name, None)
                if registry:
                    self._saved.append((registry, list(registry.items())))

    def clear(self) -> None:
        """Remove the hooks."""
        for registry, _ in self._saved:
            registry.clear()

    def restore(self) -> None:
        """Restore the same hooks in the same order. Safe to run twice."""
        for registry, items in self._saved:
            registry.clear()
            registry.update(items)
