"""Megatron's capture helper and layers where Transformer Engine is not installed.

Megatron captures by TE, so its helper asserts that TE is there, and its helper and layers ask which
release, to know what the graphs take: keyword arguments, as many layers as each chunk has, shared
buffers. Every backend of this package takes all of that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megatron_cg.upstream.patch import put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol

_GRAPHS = "megatron.core.transformer.cuda_graphs"
_LAYER = "megatron.core.transformer.transformer_layer"
_MODULES = tuple(
    Symbol("megatron-core", path, "a module that asks for TE's release")
    for path in (_GRAPHS, _LAYER)
)
_FLAG = Symbol("megatron-core", f"{_GRAPHS}:HAVE_TE_GRAPHS", "what the helper asserts")
_RELEASE = tuple(
    Symbol("megatron-core", f"{path}:is_te_min_version", "what asks for TE's release")
    for path in (_GRAPHS, _LAYER)
)
RELIES_ON = (*_MODULES, _FLAG, *_RELEASE)


def capture_without_te() -> Callable[[], None]:
    """Let Megatron capture by a backend of this package; returns the undo.

    Changes nothing where TE is installed.
    """
    if _FLAG.find():
        return _nothing
    with ExitStack() as undo:
        graphs, layer = (module.find() for module in _MODULES)
        undo.callback(set_attribute(graphs, "HAVE_TE_GRAPHS", True))
        for module in (graphs, layer):
            undo.callback(put_over(module, "is_te_min_version", _takes_all))
        return undo.pop_all().close


def _takes_all(*_release: Any, **_options: Any) -> bool:
    return True


def _nothing() -> None:
    return None
