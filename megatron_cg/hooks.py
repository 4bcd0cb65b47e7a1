"""Hooks of modules and parameters: read, removed for a capture, and restored exactly.

Hooks are read from torch's own registries, in their order: ``MegatronFSDP.forward_pre_hooks`` is
keyed by class name, so layers overwrite each other there. The registries are private attributes
that ``torch.nn.Module.__init__`` creates; torch 2.11, ``torch/nn/modules/module.py``.

Note [Registries are emptied, never replaced]
    A ``RemovableHandle`` holds a weak reference to the dict that contains its hook (torch 2.11,
    ``torch/utils/hooks.py``). With a new dict, ``remove()`` of existing handles would do nothing.
    So hooks are removed and restored by changing the contents of the same dict objects, in place.
    The autograd engine holds a parameter's dicts in the same way.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from megatron_cg.upstream.patch import Undo, cells_of
from megatron_cg.upstream.symbols import Symbol


class HookKind(Enum):
    """The registry of ``torch.nn.Module`` that holds a hook; the value is its attribute."""

    FORWARD_PRE = "_forward_pre_hooks"
    FORWARD = "_forward_hooks"
    BACKWARD_PRE = "_backward_pre_hooks"
    BACKWARD = "_backward_hooks"


MODULE_REGISTRIES = (
    *(kind.value for kind in HookKind),
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""The last three hold one flag per hook id."""

RELIES_ON = (
    Symbol("torch.nn:Module", "the registries of a module's hooks", attributes=MODULE_REGISTRIES),
)


@dataclass(frozen=True)
class HookRecord:
    kind: HookKind
    hook_id: int
    fn: Callable[..., Any]


def module_hooks(module: nn.Module) -> Iterator[HookRecord]:
    """The hooks of ``module`` itself (not of its children), each registry in calling order."""
    for kind in HookKind:
        for hook_id, fn in getattr(module, kind.value).items():
            yield HookRecord(kind, hook_id, fn)


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside partials and decorators (such as ``torch.compiler.disable``)."""
    inner: Any = fn
    while inner is not None:
        fn = inner
        inner = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "__wrapped__", None)
        inner = fn.func if isinstance(fn, functools.partial) else inner
    return fn


def describe(fn: Callable[..., Any]) -> str:
    """A name that locates the hook in its source: module, qualified name and line."""
    inner = innermost(fn)
    if inspect.ismethod(inner):
        inner = inner.__func__
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    home = getattr(inner, "__module__", type(inner).__module__)
    code = getattr(inner, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    return f"{home}.{name}{line}"


RECORDER = "transformers.utils.output_capturing", "output_capturing_hook"
"""A hook of transformers 5 for ``output_attentions`` and the like. The first call that asks for any
of them puts it on all modules, where it stays: LLaVA and SegFormer ask for hidden states."""


def is_idle(fn: Callable[..., Any]) -> bool | None:
    """Whether the call that runs now asks for nothing of such a hook; None if it is none."""
    if (getattr(fn, "__module__", ""), getattr(fn, "__name__", "")) != RECORDER:
        return None
    key, collector = cells_of(fn).get("key"), fn.__globals__.get("_active_collector")
    if key is None or collector is None:
        return None
    asked: Any = collector.get()
    return asked is None or key.cell_contents not in asked


_PARAMETER_REGISTRIES = ("_post_accumulate_grad_hooks", "_backward_hooks")


class HookSnapshot:
    """All hooks of some modules (not of their children) or parameters, as they are now.

    Those of parameters, after accumulation and on gradients, must not run during warmup and
    capture. Otherwise gradients of synthetic inputs would be reduced over all ranks
    (``_process_post_backward_gradients`` of Megatron-FSDP is such a hook).
    """

    def __init__(self, *owners: nn.Module | torch.Tensor) -> None:
        self._modules = [one for one in owners if isinstance(one, nn.Module)]
        self._full = [module._is_full_backward_hook for module in self._modules]
        names = ((one, MODULE_REGISTRIES) for one in self._modules)
        others = ((one, _PARAMETER_REGISTRIES) for one in owners if isinstance(one, torch.Tensor))
        found = (getattr(one, name, None) for one, all_of in (*names, *others) for name in all_of)
        self._saved = [(hooks, list(hooks.items())) for hooks in found if hooks is not None]

    def clear(self) -> Undo:
        """Remove all hooks; returns :meth:`restore`, which installs them again."""
        for registry, _ in self._saved:
            registry.clear()
        for module in self._modules:
            module._is_full_backward_hook = None
        return self.restore

    def restore(self) -> None:
        """Restore the same hooks in the same order, with their flags. Safe to run twice."""
        for registry, items in self._saved:
            registry.clear()
            registry.update(items)
        for module, full in zip(self._modules, self._full, strict=True):
            module._is_full_backward_hook = full
