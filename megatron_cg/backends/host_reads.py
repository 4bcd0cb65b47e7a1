"""Refuses operations that make the host wait for the device, when a capture runs on a CPU.

The tape sees the ATen operations of the captured module. torch's own tags and the
arguments show which of them a GPU could not run in a capture. The error names the operation.

A tape refuses the thread that captures. Others may read tensors meanwhile, such as one that loads
data or writes a checkpoint. On a CPU, autograd runs a backward pass in its caller's thread.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.places import place_of
from megatron_cg.errors import HostSyncError

#: Torch tags them as data dependent, but only some of their arguments make them so.
_SOMETIMES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "repeat_interleave"}
)


class _OfThread(threading.local):
    """What the current thread must not read, the innermost capture last."""

    def __init__(self) -> None:
        self.refusing: list[HostReads] = []


_here = _OfThread()


class HostReads:
    """Refuses host reads and waits for the device in one pass of a captured module.

    Args:
        root: the captured module.
        label: the pass, for messages.
    """

    def __init__(self, root: nn.Module, label: str) -> None:
        self._root, self._label = root, label

    @contextmanager
    def waits_refused(self) -> Iterator[None]:
        """Make :func:`host_waits` raise HostSyncError in the block."""
        _here.refusing.append(self)
        try:
            yield
        finally:
            _here.refusing.pop()

    def check(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise HostSyncError if a CUDA kernel for this call would make the host wait."""
        if _reads(func, args, kwargs):
            raise self.error(str(func))

    def error(self, what: str) -> HostSyncError:
        """The error for a read or a wait by ``what``, with the place of the call."""
        return HostSyncError(f"{what} in {self.place()}")

    def upload_error(self, what: str) -> HostSyncError:
        """The same for a host tensor that ``what`` copies to the device."""
        return HostSyncError(f"{what} on a tensor of the host in {self.place()}", upload=True)

    def place(self) -> str:
        """The module and line that run now, and the pass."""
        place = place_of(traceback.walk_stack(sys._getframe(1)), self._root)
        owner = place.owner if place is not None else type(self._root).__name__
        at = f" at {place.source}" if place is not None and place.source else ""
        return f"{owner} (captured as {self._label}){at}"


def host_waits(what: str) -> None:
    """Note that the host waits for all work of a stream; raises HostSyncError in a capture."""
    if _here.refusing:
        raise _here.refusing[-1].error(what)


def in_this_thread(original: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does ``other`` in the current thread, and ``original`` in all others."""
    this = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (other if threading.get_ident() == this else original)(*args, **kwargs)

    return call


def _reads(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name, is_tagged = _name_and_tag(func)
    if name == "_to_copy" and kwargs.get("device") is not None:
        # With non_blocking torch 2.11 copies into new pinned memory, and the host does not wait.
        to_host = torch.device(kwargs["device"]).type == "cpu"
        return to_host and args[0].device.type != "cpu" and not kwargs.get("non_blocking")
    if name not in _SOMETIMES:
        return is_tagged
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "index":
        return masks
    # Torch turns a masked put of one value into masked_fill, which needs no count.
    return masks and args[2].numel() != 1


@cache
def _name_and_tag(func: torch._ops.OpOverload) -> tuple[str, bool]:
    """The name, and whether torch tags the operation as data dependent."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return func._schema.name.partition("::")[2], any(tag in func.tags for tag in tags)
