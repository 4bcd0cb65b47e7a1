"""Who holds a tensor that a pass has made and that outlived the pass."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from types import CellType, FrameType
from typing import Any

import torch

from megatron_cg.capture.operations import key_of
from megatron_cg.capture.python_state import is_known
from megatron_cg.upstream.patch import nothing_frozen


def holder_of(memory: Sequence[torch.UntypedStorage]) -> str | None:
    """What holds a tensor on one of these storages, in words; None if no Python object does.

    Frames do not count, nor what only frames hold: those are the variables of a backend that runs
    the passes. Nor do objects of packages that are known.
    """
    keys = {storage._cdata for storage in memory}
    if not keys:
        return None
    with nothing_frozen():
        return _holder_of(keys)


def _holder_of(keys: Collection[int]) -> str | None:
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor) and key_of(one) in keys
    ]
    for tensor in found:
        for holder in gc.get_referrers(tensor):
            if holder is not found and _counts(holder):
                return _named(holder)
    return None


def _counts(holder: Any) -> bool:
    if isinstance(holder, FrameType) or is_known(holder):
        return False
    if not isinstance(holder, list | tuple | dict | set):
        return True
    owners = gc.get_referrers(holder)
    of_frame = any(isinstance(one, FrameType) for one in owners)
    return not of_frame and not any(
        is_known(one) for one in owners if getattr(one, "__dict__", None) is holder
    )


def _named(holder: Any) -> str:
    if isinstance(holder, CellType):
        return "a variable of a function"
    return f"a {type(holder).__name__}"
