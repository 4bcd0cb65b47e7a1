"""Megatron's capture helper and layers where Transformer Engine is not installed.

Megatron captures by TE, so its helper asserts that TE is there, and its helper and layers ask which
release, to know what the graphs take: keyword arguments, as many layers as each chunk has, shared
buffers. Every backend of this package takes all of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron_cg.upstream.patch import Undo, all_of, put_over, set_attribute
from megatron_cg.upstream.symbols import Symbol

_GRAPHS = "megatron.core.transformer.cuda_graphs"
_LAYER = "megatron.core.transformer.transformer_layer"
_FLAG = Symbol("megatron-core", f"{_GRAPHS}:HAVE_TE_GRAPHS", "what the helper asserts")
_RELEASE = tuple(
    Symbol("megatron-core", f"{path}:is_te_min_version", "what asks for TE's release")
    for path in (_GRAPHS, _LAYER)
)
RELIES_ON = (_FLAG, *_RELEASE)


def capture_without_te() -> Callable[[], None]:
    """Let Megatron capture by a backend of this package; returns the undo.

    Changes nothing where TE is installed.
    """
    if _FLAG.find():
        return lambda: None
    return all_of(_changes())


def _changes() -> Iterator[Undo]:
    yield set_attribute(*_FLAG.place(), True)
    for asked in _RELEASE:
        yield put_over(*asked.place(), _takes_all)


def _takes_all(*_release: Any, **_options: Any) -> bool:
    return True
