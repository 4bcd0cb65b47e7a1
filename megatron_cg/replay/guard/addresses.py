"""Memory that a graph reads but does not receive as input: parameters and buffers.

Note [One address a bucket]
    Under Megatron-FSDP the unsharded parameters of a bucket are views of one storage, and each
    unshard sets all of them to that storage (megatron-fsdp 0.6.1,
    ``DataParallelBuffer.fetch_bucket`` with ``set_param_data``). So one parameter per bucket is
    checked. With ``optim`` and ``optim_grads`` FSDP does not set parameters at each unshard, so
    every parameter is checked.

Note [Twice a pass]
    A layer's parameters are unsharded once for its forward pass and again for its backward pass,
    and their addresses can change each time. Capture records both, right after FSDP's own hooks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from megatron_cg.replay.guard import Mismatch

_RAW = ("_data", "_transpose", "_rowwise_data", "_columnwise_data", "_scale_inv")
"""Where TE 2.20.2 keeps the memory of a quantized tensor; its own address has no meaning."""


@dataclass(frozen=True)
class Watched:
    """A tensor that a graph reads at a fixed address, its name, and why it might move."""

    tensor: torch.Tensor
    name: str
    cause: str


class Addresses:
    """The tensors of one unit, and their addresses in capture's forward and backward passes."""

    def __init__(self, watched: Iterable[Watched] = ()) -> None:
        self._watched: list[Watched] = []
        self._at: dict[bool, list[object]] = {True: [], False: []}
        """The addresses in the forward pass, and in the backward pass."""
        self._layout: list[object] = []
        """Strides and shapes in the forward pass."""
        self.add(watched)

    def add(self, watched: Iterable[Watched]) -> None:
        """Watch more tensors, of which none is watched already."""
        known = {id(item.tensor) for item in self._watched}
        self._watched += [item for item in watched if id(item.tensor) not in known]
        tensors = [item.tensor for item in self._watched]
        on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        self._read = [_reader(tensor, on_device=on_device) for tensor in tensors]
        # Of quantized tensors neither address nor layout has a meaning.
        self._plain = [item for item in self._watched if not is_quantized(item.tensor)]
        both = [(item.tensor.stride, item.tensor.size) for item in self._plain]
        self._read_layout = [read for pair in both for read in pair]

    def note(self, *, forward: bool) -> None:
        """Record all addresses as a forward or a backward pass begins; the last call counts."""
        self._at[forward] = self._now()
        if forward:
            self._layout = self._layout_now()

    def are_as_in_backward(self) -> bool:
        """Whether all weights are already at the addresses that the backward pass reads."""
        return self._now() == self._at[False]

    def broken(self, *, forward: bool) -> Mismatch | None:
        """The first tensor that has moved, before a replay of that pass."""
        expected, now = self._at[forward], self._now()
        if now == expected:
            return self._moved_in_place() if forward else None
        index = next(n for n, (a, b) in enumerate(zip(expected, now, strict=True)) if a != b)
        item, phase = self._watched[index], "forward" if forward else "backward"
        return Mismatch(
            "address",
            f"the memory of {item.name} in the {phase} pass",
            _hex(expected[index]),
            _hex(now[index]),
            item.cause,
        )

    def _moved_in_place(self) -> Mismatch | None:
        """The first tensor that reads the same memory in another layout (``w.data = w.data.t()``).

        A graph reads memory in the layout of capture.
        """
        now = self._layout_now()
        if now == self._layout:
            return None
        pairs = enumerate(zip(self._layout, now, strict=True))
        number, before, after = next((n, a, b) for n, (a, b) in pairs if a != b)
        item = self._plain[number // 2]
        return Mismatch(
            "address", f"the layout of {item.name}", str(before), str(after), item.cause
        )

    def _now(self) -> list[object]:
        return [read() for read in self._read]

    def _layout_now(self) -> list[object]:
        return [read() for read in self._read_layout]


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` keeps its values in other tensors, as TE's quantized ones do."""
    return any(isinstance(getattr(tensor, name, None), torch.Tensor) for name in _RAW)


def _reader(tensor: torch.Tensor, *, on_device: bool) -> Callable[[], object]:
    """Return a function that reads the address of ``tensor``, or all addresses if quantized."""
    if on_device and tensor.device.type == "cpu":
        # Kernels of the device got its value at capture, so a change in place counts too.
        return lambda: (tensor.data_ptr(), tensor._version)
    if not is_quantized(tensor):
        return partial(_address, tensor) if isinstance(tensor, DTensor) else tensor.data_ptr

    def read() -> tuple[int, ...]:
        raw = (getattr(tensor, name, None) for name in _RAW)
        return tuple(part.data_ptr() for part in raw if isinstance(part, torch.Tensor))

    return read


def _address(tensor: DTensor) -> int:
    """Of its local tensor, which others may replace."""
    return tensor._local_tensor.data_ptr()


def _hex(address: object) -> str:
    if isinstance(address, tuple):
        return ", ".join(map(hex, address))
    return hex(address) if isinstance(address, int) else str(address)
