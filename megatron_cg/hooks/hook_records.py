"""Records of hooks: the PyTorch registry of a hook, its id and its function.

Hooks are read from torch's own registries, in their order. They are never read from
the bookkeeping of the library that installed them: ``MegatronFSDP.forward_pre_hooks`` is keyed by
class name, so layers overwrite each other there. The registries are private attributes that
``torch.nn.Module.__init__`` creates; torch 2.11, ``torch/nn/modules/module.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from megatron_cg.upstream.symbols import Symbol


class HookKind(Enum):
    """The registry of ``torch.nn.Module`` that holds a hook; the value is its attribute."""

    FORWARD_PRE = "_forward_pre_hooks"
    FORWARD = "_forward_hooks"
    BACKWARD_PRE = "_backward_pre_hooks"
    BACKWARD = "_backward_hooks"


FLAG_REGISTRIES = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Registries that hold one flag per hook id, in addition to the four of :class:`HookKind`."""

RELIES_ON = (
    Symbol(
        "torch.nn:Module",
        "the registries of a module's hooks",
        attributes=(*(kind.value for kind in HookKind), *FLAG_REGISTRIES),
    ),
)


@dataclass(frozen=True)
class HookRecord:
    """One hook as torch holds it."""

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
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
            continue
        inner = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "__wrapped__", None)
        if inner is None:
            return fn
        fn = inner


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
