"""What makes the host wait for the device: by torch's tags, and by methods of tensors.

Note [Where a tensor is]
    On a CPU, host and device share their memory, so a tensor cannot show where it would be on a
    machine with a GPU. What a pass makes from numbers alone may be on the host, and each pass makes
    the same: it may be read. All other tensors are the device's. Copies from the host to the device
    are not refused: CUDA itself refuses them in a capture, or a kernel keeps the value of a
    zero-dimensional tensor, as a tape does.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from megatron_cg.upstream.patch import set_attribute

#: Torch tags them as data dependent, but only some of their arguments make them so.
_SOMETIMES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "repeat_interleave"}
)
#: Methods that read memory on the host, most without calling an ATen operation.
_METHODS = ("tolist", "numpy", "__array__", "cpu", "to")


def waits(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name, is_tagged = _name_and_tag(func)
    if name not in _SOMETIMES:
        return is_tagged
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and func._schema.overload_name != "self_int"
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


@contextmanager
def methods_watched(read: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """In the block, call ``read`` before this thread reads a tensor by a method.

    Other threads may read tensors meanwhile, such as one that writes a checkpoint. On a CPU,
    autograd runs a backward pass in its caller's thread.
    """
    thread = threading.get_ident()

    def watching(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads = name != "to" or any(map(_is_host, (*args, kwargs.get("device"))))
            if reads and threading.get_ident() == thread:
                read(tensor, f"Tensor.{name}")
            return original(tensor, *args, **kwargs)

        return method

    with ExitStack() as undo:
        for name in _METHODS:
            undo.callback(set_attribute(torch.Tensor, name, watching(name)))
        yield


def _is_host(device: object) -> bool:
    """By its name alone: on a tape ``x.device`` is ``torch.device("cpu")`` of a device tensor."""
    return isinstance(device, str) and device.partition(":")[0] == "cpu"
