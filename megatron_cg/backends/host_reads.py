"""Refuses what makes the host wait for the device, when a capture runs on a CPU.

A tape sees the ATen operations of the captured module. torch's own tags and the arguments show
which of them a GPU could not run in a capture. It refuses the thread that captures: others may read
tensors meanwhile, such as one that loads data or writes a checkpoint. On a CPU, autograd runs a
backward pass in its caller's thread.

Note [Where a tensor is]
    On a CPU, host and device share their memory, so a tensor cannot show where it would be on a
    machine with a GPU. The calls that create and move tensors show it, by their ``device``
    argument. None or the string ``"cpu"`` is the host, where PyTorch creates tensors by default.
    Anything else is the device, also a ``torch.device``, since on a tape ``x.device`` is
    ``torch.device("cpu")`` for a device tensor. Not detected: tensors that were on the host before
    the capture began, and pinned memory, which CUDA copies without waiting.

Note [What is refused]
    A copy between host and device waits for the device, and CUDA refuses to wait during a capture.
    Such copies are: ``.cpu()``, ``.to("cpu")``, ``.tolist()``; a host tensor passed to
    ``.to(device)``, ``.cuda()`` or ``copy_``, or used as an index; and a tensor of data, which
    PyTorch creates on the host and copies, as in ``torch.tensor([1.0], device="cuda")``.
    Other operations on a host tensor and a device tensor are an error on a GPU, with or without a
    graph. There is one exception: pointwise kernels and fills read the value of a zero-dimensional
    host tensor at capture, and every replay uses that value. But ``torch.where`` copies it, and so
    does ``x[index] = 1.0`` unless the index is a mask (torch 2.11, ``where_self_out`` and
    ``_index_put_impl_``).
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.places import place_of
from megatron_cg.errors import HostSyncError
from megatron_cg.upstream.patch import set_attribute

#: Torch tags them as data dependent, but only some of their arguments make them so.
_SOMETIMES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "repeat_interleave"}
)
#: Methods that read memory on the host, most without calling an ATen operation.
_READS = ("tolist", "numpy", "__array__", "cpu")
#: Functions of ``torch`` that create a tensor from data on the host.
_OF_DATA = ("as_tensor", "asarray", "tensor")
#: Functions of ``torch`` that create a tensor with a kernel on ``device``, or on the host.
_FACTORIES = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "zeros"),
)
#: Torch does not tag them pointwise, but they read the value of a zero-dimensional tensor.
_FILLS = frozenset({"fill", "fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_"})
_PUTS = frozenset({"index_put", "index_put_"})
_Storages = dict[int, torch.UntypedStorage]
_Rule = Callable[[Sequence[Any], Mapping[str, Any]], tuple[bool, bool]]
"""Takes the arguments of a call; returns whether its data is on the host, and whether its result
is."""


class _OfThread(threading.local):
    """What the current thread must not read, the innermost capture last."""

    def __init__(self) -> None:
        self.refusing: list[HostReads] = []


_here = _OfThread()


class HostReads:
    """Refuses waits for the device, and copies between it and the host, in one pass of a module.

    ``label`` names the pass of ``root`` in messages. ``host`` has the tensors on the host of all
    passes of the capture, by the keys of their storages; it holds these, so that no other storage
    gets one of their keys.
    """

    def __init__(self, root: nn.Module, label: str, host: _Storages) -> None:
        self._root, self._label, self._host = root, label, host
        self._making = 0

    @contextmanager
    def refused(self) -> Iterator[None]:
        """In the block, raise HostSyncError for waits and copies of this thread.

        Those that are ATen operations are :meth:`check`'s.
        """
        _here.refusing.append(self)
        with ExitStack() as undo:
            undo.callback(_here.refusing.pop)
            calls: list[tuple[Any, Sequence[str], _Rule, bool]] = [
                (torch.Tensor, _READS, lambda args, _: (self.has(args[0]), True), False),
                (torch.Tensor, ("cuda",), lambda args, _: (self.has(args[0]), False), False),
                (torch.Tensor, ("to",), self._moved, False),
                (torch.Tensor, ("new_tensor",), self._like_this, False),
                (torch, _OF_DATA, self._of_data, True),
                (torch, _FACTORIES, _made, True),
            ]
            for owner, names, rule, makes in calls:
                for name in names:
                    changed = self._around(owner, name, rule, makes=makes)
                    undo.callback(set_attribute(owner, name, changed))
            yield

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host."""
        return tensor.untyped_storage()._cdata in self._host

    def add(self, values: Sequence[Any]) -> None:
        """Record that the tensors among ``values`` are on the host."""
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._host[storage._cdata] = storage

    def is_of_host(
        self, func: torch._ops.OpOverload, tensors: Sequence[torch.Tensor], writes: Sequence[Any]
    ) -> bool:
        """Whether a call that gets ``tensors`` is work of the host, which no graph contains.

        Raises HostSyncError if it would copy between the host and the device.
        """
        # torch.tensor(...) ends with lift_fresh, on data of the host.
        if func is torch.ops.aten.lift_fresh.default or (self._making and not tensors):
            return True
        here = sum(map(self.has, tensors))
        if 0 < here < len(tensors) and not self._takes(func, tensors, writes):
            raise self.error(str(func), upload=not any(map(self.has, writes)))
        return 0 < here == len(tensors)

    def check(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise HostSyncError if a CUDA kernel for this call would make the host wait."""
        if _reads(func, args, kwargs):
            raise self.error(str(func))

    def error(self, what: str, *, upload: bool = False) -> HostSyncError:
        """The error for ``what``, which waits, or copies to the device, with its place."""
        on = " on a tensor of the host" if upload else ""
        return HostSyncError(f"{what}{on} in {self.place()}", upload=upload)

    def place(self) -> str:
        """The module and line that run now, and the pass."""
        place = place_of(traceback.walk_stack(sys._getframe(1)), self._root)
        owner = place.owner if place is not None else type(self._root).__name__
        at = f" at {place.source}" if place is not None and place.source else ""
        return f"{owner} (captured as {self._label}){at}"

    def _takes(
        self, func: torch._ops.OpOverload, tensors: Sequence[torch.Tensor], writes: Sequence[Any]
    ) -> bool:
        """Whether a kernel may take the host tensors among these; see Note [What is refused]."""
        here = [tensor for tensor in tensors if self.has(tensor)]
        if any(tensor.dim() for tensor in here) or any(map(self.has, writes)):
            return False
        name = func._schema.name.partition("::")[2]
        if name in _PUTS:
            # With a mask, torch fills instead of copying.
            return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:-1])
        return name in _FILLS or (torch.Tag.pointwise in func.tags and name != "where")

    def _around(self, owner: Any, name: str, rule: _Rule, *, makes: bool) -> Callable[..., Any]:
        label = f"{'torch' if owner is torch else 'Tensor'}.{name}"
        original, thread = getattr(owner, name), threading.get_ident()

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            is_here, comes_here = rule(args, kwargs)
            if is_here is not comes_here:
                raise self.error(label, upload=is_here)
            if not makes or not comes_here:
                return original(*args, **kwargs)
            self._making += 1
            try:
                made = original(*args, **kwargs)
            finally:
                self._making -= 1
            self.add([made])
            return made

        return call

    def _moved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
        is_here = self.has(args[0])
        first = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(first, torch.Tensor):
            return is_here, self.has(first)
        if "device" in kwargs:
            first = kwargs["device"]
        elif isinstance(first, torch.dtype):
            first = None
        return is_here, is_here if first is None else _is_host(first)

    def _like_this(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
        tensor, data = args[0], args[1] if len(args) > 1 else kwargs["data"]
        device = kwargs.get("device")
        comes_here = self.has(tensor) if device is None else _is_host(device)
        return comes_here if isinstance(data, torch.Tensor) else True, comes_here

    def _of_data(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        is_here = self.has(data) if isinstance(data, torch.Tensor) else True
        device = kwargs.get("device")
        return is_here, is_here if device is None else _is_host(device)


def host_waits(what: str) -> None:
    """Note that the host waits for all work of a stream; raises HostSyncError in a capture."""
    if _here.refusing:
        raise _here.refusing[-1].error(what)


def _made(_args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
    here = kwargs.get("out") is None and _is_host(kwargs.get("device"))
    return here, here


def _is_host(device: Any) -> bool:
    return device is None or (isinstance(device, str) and device.partition(":")[0] == "cpu")


def _reads(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name, is_tagged = _name_and_tag(func)
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
