"""Calls of a model: what an ATen call gets and writes, and the place of a call in the model."""

import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


def leaves(value: Any) -> list[Any]:
    """The leaves of lists and tuples; an ATen call nests nothing else.

    torch's general tree functions take several times as long, for each argument.
    """
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def written(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    given = (args[at] if at < len(args) else kwargs.get(name) for at, name in _places(func))
    return [tensor for value in given for tensor in tensors_in(value)]


@cache
def _places(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names; cached, since reading a schema takes longer than most kernels here."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


_PLAIN = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
"""What classes of tensors have that add no operations of their own, such as Parameter."""


def has_wrapper(types: Iterable[type]) -> bool:
    """Whether a class of tensors, such as DTensor, calls operations on tensors of its own.

    Not a FakeTensor: DTensor traces an operation that is new to it with those.
    """
    kinds = (kind for kind in types if kind is not FakeTensor)
    return any(getattr(kind, "__torch_dispatch__", None) not in _PLAIN for kind in kinds)


class CallMode(TorchDispatchMode):
    """Calls :meth:`run` for each ATen call of its block on memory, those inside of others too.

    A higher-order operator without a body is not supported, as torch says then.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run(self, func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_wrapper(types):
            return NotImplemented  # Its own operations come here.
        if FakeTensor in types:
            return func(*args, **kwargs)
        if not isinstance(func, HigherOrderOperator):
            return self.run(func, args, kwargs)
        body = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if body is None:
            return NotImplemented
        with self:  # Code that torch.compile calls would be compiled too.
            return torch.compiler.disable(body)(*args, **kwargs)


Frames = Iterable[tuple[FrameType, int]]
"""Frames with their current lines, the innermost first, as from ``traceback.walk_stack``."""

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = Path(__file__).parents[1]
_NOT_THE_MODEL = (
    _TORCH,
    *(str(_PACKAGE / name) for name in ("backends", "capture", "replay")),
    *(str(_PACKAGE / name) for name in ("fully_shard", "native", "units", "tape")),
)
"""Prefixes of files with code that a model calls but that is not part of the model."""


@dataclass(frozen=True)
class Place:
    """One call in the code of a model. Holds no tensor and no frame."""

    module: nn.Module | None
    """The innermost module whose code runs; None in a backward pass."""
    path: str
    """Its name below the root; empty for the root."""
    source: str
    """File, line, function and statement; empty if all known frames are in torch."""

    @property
    def owner(self) -> str:
        """The module in words: its path and its class."""
        if self.module is None:
            return "the backward pass"
        return f"{self.path or 'the callable itself'} ({type(self.module).__name__})"

    def __str__(self) -> str:
        return f"{self.owner}, {self.source}" if self.source else self.owner


def place_of(frames: Frames, root: nn.Module) -> Place | None:
    """The innermost call of a module below ``root``, or None if ``frames`` have none.

    In a backward pass autograd calls no module, so the place has no module. The frames of a
    ``torch.autograd.Function`` written in Python still show the line.
    """
    names = {id(module): name for name, module in root.named_modules()}
    source = ""
    for frame, line in frames:
        if frame.f_code is torch.autograd.backward.__code__:
            return Place(None, "", source)
        if not source and not frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
            code = frame.f_code
            text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
            statement = f": `{text}`" if text else ""
            source = f"{code.co_filename}:{line} in {code.co_name}{statement}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return Place(owner, names[id(owner)], source)
    return None
