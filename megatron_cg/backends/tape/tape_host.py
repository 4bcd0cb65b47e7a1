"""Which tensors of a capture are on the host, and which uses of them CUDA refuses.

On a CPU, host and device share their memory, so a tensor cannot show where it would be on a machine
with a GPU. The calls that create and move tensors show it, by their ``device`` argument:

* None or the string ``"cpu"``: the host, where PyTorch creates tensors by default;
* anything else: the device. This includes a ``torch.device``, since on a tape ``x.device`` is
  ``torch.device("cpu")`` for a device tensor.

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

Not detected: tensors that were on the host before the capture began, and pinned memory, which CUDA
copies without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_cg.backends.host_reads import in_this_thread
from megatron_cg.upstream.patch import set_attribute

Refuse = Callable[[str], Exception]

#: Methods that read memory on the host without calling an ATen operation.
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


class Host:
    """The tensors of one capture that are on the host."""

    def __init__(self) -> None:
        # Holds the storages themselves, so that no other storage gets one of their keys.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._making = 0
        self._read: Refuse = RuntimeError
        self._upload: Refuse = RuntimeError

    @property
    def makes(self) -> bool:
        """Whether a tensor that is created now is on the host."""
        return self._making > 0

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host."""
        return tensor.untyped_storage()._cdata in self._storages

    def add(self, values: Sequence[Any]) -> None:
        """Record that the tensors among ``values`` are on the host."""
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._storages[storage._cdata] = storage

    def can_be_read_by(
        self, func: torch._ops.OpOverload, tensors: Sequence[torch.Tensor], writes: Sequence[Any]
    ) -> bool:
        """Whether a kernel may take the host tensors among ``tensors`` and write ``writes``.

        See Note [What is refused].
        """
        here = [tensor for tensor in tensors if self.has(tensor)]
        if any(tensor.dim() for tensor in here) or any(map(self.has, writes)):
            return False
        name = func._schema.name.partition("::")[2]
        if name in _PUTS:
            # With a mask, torch fills instead of copying.
            return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:-1])
        return name in _FILLS or (torch.Tag.pointwise in func.tags and name != "where")

    @contextmanager
    def watched(self, read: Refuse, upload: Refuse) -> Iterator[None]:
        """In the block, refuse copies of this thread that do not appear as an ATen operation.

        Args:
            read: makes the error for a copy to the host, given the name of the call.
            upload: the same for a copy to the device.
        """
        self._read, self._upload = read, upload
        with ExitStack() as undo:

            def put(owner: Any, name: str, make: Callable[[Any, str], Any]) -> None:
                label = f"{'torch' if owner is torch else 'Tensor'}.{name}"
                original = getattr(owner, name)
                changed = in_this_thread(original, make(original, label))
                undo.callback(set_attribute(owner, name, changed))

            for name in _READS:
                put(torch.Tensor, name, self._reading)
            for name in ("cuda", "to"):
                put(torch.Tensor, name, self._moving)
            put(torch.Tensor, "new_tensor", self._like_this)
            for name in _OF_DATA:
                put(torch, name, self._of_data)
            for name in _FACTORIES:
                put(torch, name, self._made)
            yield

    def _refuse_copy(self, label: str, *, is_here: bool, comes_here: bool) -> None:
        """Raise if a call copies between the host, which is here, and the device."""
        if is_here is not comes_here:
            raise (self._upload if is_here else self._read)(label)

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        self._making += 1
        try:
            yield
        finally:
            self._making -= 1

    def _reading(self, original: Callable[..., Any], label: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._refuse_copy(label, is_here=self.has(tensor), comes_here=True)
            return original(tensor, *args, **kwargs)

        return call

    def _moving(self, original: Callable[..., Any], label: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_here = self.has(tensor)
            comes_here = self._goes_to_host(label, is_here, args, kwargs)
            self._refuse_copy(label, is_here=is_here, comes_here=comes_here)
            return original(tensor, *args, **kwargs)

        return call

    def _goes_to_host(
        self, label: str, is_here: bool, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> bool:
        if label == "Tensor.cuda":
            return False
        first = args[0] if args else kwargs.get("other")
        if isinstance(first, torch.Tensor):
            return self.has(first)
        if "device" in kwargs:
            first = kwargs["device"]
        elif isinstance(first, torch.dtype):
            return is_here
        return is_here if first is None else _is_host(first)

    def _like_this(self, original: Callable[..., Any], label: str) -> Any:
        def call(tensor: torch.Tensor, data: Any, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            here = self.has(tensor) if device is None else _is_host(device)
            if not isinstance(data, torch.Tensor):
                self._refuse_copy(label, is_here=True, comes_here=here)
            return original(tensor, data, *args, **kwargs)

        return call

    def _on_host_made(
        self, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        with self._on_host():
            made = original(*args, **kwargs)
        self.add([made])
        return made

    def _of_data(self, original: Callable[..., Any], label: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
            device = kwargs.get("device")
            is_here = self.has(data) if isinstance(data, torch.Tensor) else True
            comes_here = is_here if device is None else _is_host(device)
            self._refuse_copy(label, is_here=is_here, comes_here=comes_here)
            if not comes_here:
                return original(*args, **kwargs)
            return self._on_host_made(original, args, kwargs)

        return call

    def _made(self, original: Callable[..., Any], _label: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("out") is not None or not _is_host(kwargs.get("device")):
                return original(*args, **kwargs)
            return self._on_host_made(original, args, kwargs)

        return call


def _is_host(device: Any) -> bool:
    return device is None or (isinstance(device, str) and device.partition(":")[0] == "cpu")
