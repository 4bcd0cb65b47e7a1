"""What an ATen call gets and writes, read from its arguments and its schema."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
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


def run_inside(mode: TorchDispatchMode, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
    """Run a higher-order operator whose dispatch mode is off; the mode sees what it consists of.

    An operator without such a body is not supported, as torch says then.
    """
    body = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    if body is None:
        return NotImplemented
    with mode:
        # Code that torch.compile calls would be compiled too.
        return torch.compiler.disable(body)(*args, **kwargs)
