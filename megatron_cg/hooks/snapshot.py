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

from megatron_cg.hooks.hook_records import FLAG_REGISTRIES, HookKind

_MODULE_REGISTRIES = (*(kind.value for kind in HookKind), *FLAG_REGISTRIES)
_PARAMETER_REGISTRIES = ("_post_accumulate_grad_hooks", "_backward_hooks")


class _Registries:
    """Registries with their hooks, as they are when this is made."""

    def __init__(self, registries: Iterable[dict[int, Any]]) -> None:
        self._saved = [(registry, list(registry.items())) for registry in registries]

    def clear(self) -> None:
        """Remove all hooks; :meth:`restore` installs them again."""
        for registry, _ in self._saved:
            registry.clear()

    def restore(self) -> None:
        """Restore the same hooks in the same order, with their flags. Safe to run twice."""
        for registry, items in self._saved:
            registry.clear()
            registry.update(items)


class HookSnapshot(_Registries):
    """All hooks of one module (not of its children)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(getattr(module, name) for name in _MODULE_REGISTRIES)
        self.module = module
        self._is_full_backward_hook = module._is_full_backward_hook

    def clear(self) -> None:
        """Remove all hooks from the module; :meth:`restore` installs them again."""
        super().clear()
        self.module._is_full_backward_hook = None

    def restore(self) -> None:
        """Restore the same hooks in the same order, with their flags. Safe to run twice."""
        super().restore()
        self.module._is_full_backward_hook = self._is_full_backward_hook


class ParameterHookSnapshot(_Registries):
    """The hooks that autograd runs for given parameters: after accumulation, and on gradients.

    They must not run during warmup and capture. Otherwise gradients of synthetic inputs would be
    reduced over all ranks (``_process_post_backward_gradients`` of Megatron-FSDP is such a hook).
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        registries = (getattr(p, name, None) for p in parameters for name in _PARAMETER_REGISTRIES)
        super().__init__(registry for registry in registries if registry)
