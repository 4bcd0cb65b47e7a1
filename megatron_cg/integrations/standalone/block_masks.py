"""``BlockMask`` of flex_attention as an argument: what it holds, down to its ``mask_mod``.

It has tensors, which say what blocks are needed, and a function, ``mask_mod``, with more tensors
in its closure, such as where documents begin. Loops make a new one for each batch. So all these
tensors are inputs of a graph, and the rest must stay as it was at capture: code, numbers and block
size. In the capture the unit gets a ``BlockMask`` like the caller's, on the graph's tensors.

Note [What a mask_mod may read]
    Its arguments, its closure and global numbers; functions and tuples in them are opened too. A
    global tensor, or one in an object such as a ``functools.partial``, would be read where it was
    at capture, and no guard would see a change. So it is refused by name.
"""

import dis
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_leaves

from megatron_cg.replay.plain import is_plain
from megatron_cg.upstream.symbols import Symbol

_ATTRIBUTES = ("_TENSOR_ATTRS", "_CONTEXT_ATTRS")
_PATH = "torch.nn.attention.flex_attention:BlockMask"
RELIES_ON = (Symbol(_PATH, "what a block mask consists of", attributes=_ATTRIBUTES),)
_FIXED = (ModuleType, type, BuiltinFunctionType)
"""Globals whose own state is not looked at."""
_DEPTH = 8
"""How deep functions and tuples inside of a ``mask_mod`` are opened."""


class Parts(dict[str, Any]):
    """What a block mask or a function consists of; ``whole`` makes another one of such parts."""

    def __init__(self, whole: Any, parts: dict[str, Any]) -> None:
        super().__init__(parts)
        self.whole = whole


register_pytree_node(
    Parts,
    lambda parts: ([*parts.values()], (parts.whole, *parts)),
    lambda values, known: known[0](**dict(zip(known[1:], values, strict=True))),
    flatten_with_keys_fn=lambda parts: (
        [(GetAttrKey(name), part) for name, part in parts.items()],
        (parts.whole, *parts),
    ),
)


@dataclass(frozen=True)
class _Function:
    """Makes functions of one ``def``."""

    code: CodeType
    scope: dict[str, Any] = field(compare=False, repr=False)

    def __call__(self, **parts: Any) -> FunctionType:
        cells = tuple(CellType(parts[name]) for name in self.code.co_freevars)
        return FunctionType(self.code, self.scope, closure=cells)


def opened(value: Any) -> Any:
    """``value`` with the parts of each block mask in it, for the tree functions of torch."""
    kind = type(value)
    if kind is BlockMask:
        names = (*BlockMask._TENSOR_ATTRS, *BlockMask._CONTEXT_ATTRS)
        parts = {name: getattr(value, name) for name in names}
        return Parts(BlockMask, parts | {"mask_mod": _opened(value.mask_mod, _DEPTH)})
    if kind is tuple or kind is list:
        return kind(map(opened, value))
    return {key: opened(one) for key, one in value.items()} if kind is dict else value


def _opened(value: Any, depth: int) -> Any:
    """A ``mask_mod``, or what its closure holds; see the note above."""
    if type(value) in (tuple, list):
        return type(value)(_opened(one, depth - 1) for one in value)
    if type(value) is not FunctionType or value.__defaults__ or value.__kwdefaults__ or not depth:
        return value
    whole, scope = _Function(value.__code__, value.__globals__), value.__globals__
    cells = zip(whole.code.co_freevars, value.__closure__ or (), strict=True)
    parts = {name: _opened(cell.cell_contents, depth - 1) for name, cell in cells}
    read = {name: scope[name] for name in _globals_of(whole.code) if name in scope}
    for name, one in read.items():
        if not isinstance(one, _FIXED):
            parts[f"{name} (global)"] = _global(one, depth - 1)
    return Parts(whole, parts)


def _global(value: Any, depth: int) -> Any:
    """A global value to compare, or its class if it cannot be compared, which no graph takes."""
    if type(value) is FunctionType and not value.__closure__:
        return _opened(value, depth)
    return value if all(map(is_plain, tree_leaves(value))) else type(value)


@cache  # For each ``def``, since each call of a unit asks.
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of globals that a function reads, or one that it defines."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(dict.fromkeys([*names, *(name for one in inner for name in _globals_of(one))]))
