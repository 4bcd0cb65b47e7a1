"""What one graph's guard compares: inputs, memory and switches; see ``replay/depends_on.py``.

Note [What a graph does with its inputs]
    TE 2.20.2 (``graph.py``, ``functionalized`` and ``Graphed.forward``) copies each tensor into
    the captured static input, unless the tensor is already there. It checks neither shape nor
    dtype, and ``copy_`` broadcasts and converts. It silently ignores a keyword that was not in the
    samples. So all of this is checked here.

Note [One address a bucket]
    Under Megatron-FSDP the unsharded parameters of a bucket are views of one storage, and each
    unshard sets all of them to that storage (megatron-fsdp 0.6.1,
    ``DataParallelBuffer.fetch_bucket`` with ``set_param_data``). So one parameter per bucket is
    checked. With ``optim`` and ``optim_grads`` FSDP does not set parameters at each unshard, so
    every parameter is checked.

Note [Twice a pass]
    A layer's parameters are unsharded once for its forward pass and again for its backward pass,
    and their addresses can change each time. Capture records both, right after FSDP's own hooks.

Note [Switches of torch]
    Operations read them when they choose kernels; a graph holds those of capture. Most take a
    microsecond to read and are set once, so they are compared as a step begins. Those of SDPA are
    set around passes too (``sdpa_kernel``): units that call it have a row for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

SDPA = [f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn", "fa3")]
_OTHERS = [
    *(f"cublas_allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *("cublas_allow_tf32", "cublas_allow_fp16_accumulation", "float32_matmul_precision"),
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled"),
    *("blas_preferred_backend", "linalg_preferred_backend"),
]
CAUSE = "The graph holds the kernels of capture. Set it before the capture, and around whole steps."
_RAW = ("_data", "_transpose", "_rowwise_data", "_columnwise_data", "_scale_inv")
"""Where TE 2.20.2 keeps the memory of a quantized tensor; its own address has no meaning."""
_FIELDS = ("shape", "dtype", "stride", "device", "requires_grad")
"""Properties of a tensor that must be equal, by the name of the clause."""

NOT_INPUTS = frozenset({"is_first_microbatch", "cuda_graph_stream", "cuda_graph_event"})
"""Keywords that control a replay and are not inputs of the graph: ``GraphableMegatronModule.
_get_te_cuda_graph_replay_args`` of megatron-core 0.19.2 adds them."""

_CAUSE = {
    "shape": "The sequence length or micro batch is another than at capture",
    "dtype": "The precision of this input has changed",
    "stride": "The strides of the input have changed, for example by a transpose or expand",
    "device": "The input is on another device",
    "requires_grad": "The graph computes gradients for the inputs that needed one at capture",
}


@dataclass(frozen=True)
class Mismatch:
    """What a guard found: ``subject`` was ``expected`` at capture, and is ``actual`` now."""

    clause: str
    """The guard's clause that found it, such as ``shape`` or ``address``."""
    subject: str
    """What it is about, such as ``argument hidden_states``."""
    expected: str
    actual: str
    cause: str
    """The likely cause, and what to type or do instead."""

    @property
    def key(self) -> tuple[str, str]:
        """Mismatches with equal keys are reported only once."""
        return self.clause, self.subject

    def text(self, layer: str) -> str:
        """The full description in one line, for the log or an error."""
        return (
            f"{layer}: {self.subject} was {self.expected} at capture and "
            f"is {self.actual} now ({self.clause}). {self.cause}"
        )


class Switches:
    """Those of these names that this release of torch has, as a row; see the note above."""

    def __init__(self, names: Sequence[str] = _OTHERS) -> None:
        found = ((name, getattr(torch._C, f"_get_{name}", None)) for name in names)
        self._read = {name: read for name, read in found if read is not None}
        self._seen: dict[str, str] = {}
        self._first: str | None = None

    def get(self, _key: str = "") -> str:
        """Their values in words: one object for each choice, as a row wants it."""
        now = str([read() for read in self._read.values()])
        text = self._seen.get(now)
        if text is None:
            values = (read() for read in self._read.values())
            text = self._seen[now] = "; ".join(map("{}={}".format, self._read, values))
        return text

    def broken(self) -> Mismatch | None:
        """A change since the first call."""
        now = self.get()
        self._first = self._first or now
        if now == self._first:
            return None
        before, after = self._first.split("; "), now.split("; ")
        changed = next(pair for pair in zip(before, after, strict=True) if len(set(pair)) == 2)
        return Mismatch("switches", "a switch of torch", *changed, CAUSE)


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


class Inputs:
    """Structure and metadata of one graph's inputs.

    They are taken from the samples, as they are after capture. ``borrowed`` are those that are the
    model's own tensors; see ``static_inputs.py``. ``names`` are those of positional samples.
    ``same_gradients`` says that all inputs that needed a gradient at capture must need one.
    """

    def __init__(
        self,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        borrowed: Sequence[torch.Tensor] = (),
        names: Sequence[str] = ("hidden_states",),
        *,
        same_gradients: bool = False,
    ) -> None:
        self._same_gradients = same_gradients
        labels = [*names, *(f"number {index}" for index in range(len(names), len(args)))]
        own = {id(tensor) for tensor in borrowed}
        storages = [tensor.untyped_storage() for tensor in (*args, *kwargs.values())]
        self._memory = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        self._positional = len(args)
        self._keywords = tuple(kwargs)
        self._given: list[str] = []
        """The keywords of the last call that was as at capture."""
        self._names = [*labels[: len(args)], *kwargs]
        self._captured = [_fields(tensor) for tensor in (*args, *kwargs.values())]
        self._borrowed = [
            (number, tensor.data_ptr())
            for number, tensor in enumerate((*args, *kwargs.values()))
            if id(tensor) in own
        ]

    def broken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """The first input that is not as it was at capture."""
        given = [name for name, value in kwargs.items() if value is not None]
        if given != self._given or len(args) != self._positional:
            mismatch = self._structure(args, kwargs)
            if mismatch is not None:
                return mismatch
            self._given = given
        flat = [*args, *[kwargs[name] for name in self._keywords]]
        for tensor, name, captured in zip(flat, self._names, self._captured, strict=True):
            # One comparison for the usual case: this runs for every input of every replay.
            if not isinstance(tensor, torch.Tensor) or captured != (
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
                tensor.device,
                tensor.requires_grad,
            ):
                mismatch = self._other_kind(name, captured, tensor)
                if mismatch is not None:
                    return mismatch
        for number, address in self._borrowed:
            if flat[number].data_ptr() != address:
                return Mismatch(
                    "static input",
                    f"the memory of argument {self._names[number]}",
                    hex(address),
                    hex(flat[number].data_ptr()),
                    "It was one tensor in all steps before capture, so the graph reads it in "
                    "place. Copying another tensor there would overwrite the model's own.",
                )
        return None

    def _other_kind(self, name: str, captured: tuple[Any, ...], tensor: Any) -> Mismatch | None:
        if not isinstance(tensor, torch.Tensor):
            subject, cause = f"argument {name}", "A graph takes only tensors."
            return Mismatch("structure", subject, "a tensor", described(tensor), cause)
        for clause, before, now in zip(_FIELDS, captured, _fields(tensor), strict=True):
            # An input that needs no gradient any more gets one that nobody reads. But code may look
            # at that: torch's reentrant checkpoint then computes no gradients of weights either.
            is_allowed = clause == "requires_grad" and before and not self._same_gradients
            if before != now and not is_allowed:
                cause = f"{_CAUSE[clause]}: replaying would compute something else."
                return Mismatch(
                    clause, f"{clause} of argument {name}", _text(before), _text(now), cause
                )
        return None

    def are_returned(self, outputs: Iterable[Any]) -> bool:
        """Whether an output of the graph lies in the memory of its inputs, of which it has two.

        A graph copies one input after another (TE 2.20.2). It would overwrite such an output that
        comes back as another input before it reads it.
        """
        addresses = [value.data_ptr() for value in outputs if isinstance(value, torch.Tensor)]
        return len(self._names) > 1 and any(
            begin <= address < end for begin, end in self._memory for address in addresses
        )

    def _structure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        if len(args) != self._positional:
            subject, cause = "the number of positional arguments", "The layer is called otherwise."
            return Mismatch("structure", subject, str(self._positional), str(len(args)), cause)
        for name in self._keywords:
            if kwargs.get(name) is None:
                given = "missing" if name not in kwargs else "None"
                cause = "The layer is called with fewer inputs than at capture."
                return Mismatch("structure", f"argument {name}", "a tensor", given, cause)
        for name, value in kwargs.items():
            if value is not None and name not in self._keywords and name not in NOT_INPUTS:
                cause = "The graph would silently ignore this input."
                subject = f"argument {name}"
                return Mismatch("structure", subject, "not given", described(value), cause)
        return None


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    # The values of an object's tensors would be read on the host.
    text = "" if is_dataclass(value) else repr(value)
    return text if 0 < len(text) < 60 else f"a {type(value).__name__}"


def _fields(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def _text(value: Any) -> str:
    return str(tuple(value) if isinstance(value, torch.Size) else value)
