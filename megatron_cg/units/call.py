"""The form of a unit's calls: which arguments are tensors, which are constants, and what is around.

A graph takes tensors and nothing else. An argument that is no tensor keeps its observed value:
capture uses it, and a call with another value is not replayed. Tensors may be in tuples, lists,
dicts, named tuples, a ``UserDict`` and a ``BlockMask`` of flex_attention. A graph gets the tensors
of a call by position, and messages name them, such as ``position_embeddings[0]``.

Note [Expanded tensors]
    Nothing can be copied into a tensor whose elements share memory, such as a mask that is expanded
    over the batch. So a graph gets what was expanded, and expands it itself. Its gradient would be
    summed elsewhere than in eager training, so an expanded tensor that needs one is refused.

Note [Block masks]
    A ``BlockMask`` has tensors, which say what blocks are needed, and a function, ``mask_mod``,
    with more tensors in its closure, such as where documents begin. Loops make a new one for each
    batch. So all these tensors are inputs of a graph, and code, numbers and block size must stay as
    at capture. A ``mask_mod`` may read its arguments, its closure and global numbers, also in
    functions and tuples. A global tensor, or one in an object such as a ``functools.partial``,
    would be read where it was at capture, so it is refused by name.

Note [Checkpointing around a unit]
    The form without reentrance (torch 2.11, ``torch/utils/checkpoint.py``) pairs the tensors that
    the two passes save by their number. So replays would make gradients wrong without an error, and
    both passes run eagerly.
"""

import dis
import operator
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from megatron_cg.backends.driver import is_dense
from megatron_cg.capture.observer import positional_names
from megatron_cg.errors import ConfigurationError, Violation
from megatron_cg.replay.borders import in_backward_pass, local, same_memory, spec_of
from megatron_cg.replay.guard import Mismatch, described
from megatron_cg.replay.guarded_graph import forward_of
from megatron_cg.replay.plain import is_plain, same_value
from megatron_cg.units.layouts import Input, Layout, Mark, is_awaited, is_plain_tensor
from megatron_cg.upstream.patch import Undo, cells_of, replace_function
from megatron_cg.upstream.symbols import Symbol

_ATTRIBUTES = ("_TENSOR_ATTRS", "_CONTEXT_ATTRS")
_PATH = "torch.nn.attention.flex_attention:BlockMask"
_HOOKS = Symbol(
    "torch._C:_autograd._top_saved_tensors_default_hooks",
    "the saved-tensor hooks that apply now, or None",
)
_TRANSFORMED = Symbol("torch._C:_are_functorch_transforms_active", "whether torch.func is around")
_LEVELS = Symbol("torch.autograd:forward_ad", "forward-mode AD", attributes=("_current_level",))
RELIES_ON = (
    Symbol(_PATH, "what a block mask consists of", attributes=_ATTRIBUTES),
    *(_HOOKS, _TRANSFORMED, _LEVELS),
)
_FIXED = (ModuleType, type, BuiltinFunctionType)
"""Globals whose own state is not looked at."""
_CONSTANT = "Only tensors go into a graph; all else is in it as it was at capture."
_MASK = (
    "Models of transformers drop a mask that masks nothing. Pass a 4-D mask in each step, which "
    "they take as it is: (batch, 1, queries, keys), True where a query may see a key."
)
_LEAVES = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str})
_FILLED = Violation(
    "separate-inputs",
    "a unit changes a list or dict that it is given in its forward pass",
    "with separate_inputs=True it is given another one, so the caller would not see that",
    "return the tensors, or take the unit out of units",
)
_DEPTH = 8
"""How deep functions and tuples inside of a ``mask_mod`` are opened."""


class Parts(dict[str, Any]):
    """What a block mask, ``UserDict`` or function consists of; ``whole`` makes another one."""

    def __init__(self, whole: Any, parts: dict[str, Any]) -> None:
        super().__init__(parts)
        self.whole = whole


pytree.register_pytree_node(
    Parts,
    lambda parts: ([*parts.values()], (parts.whole, *parts)),
    lambda values, known: known[0](**dict(zip(known[1:], values, strict=True))),
    flatten_with_keys_fn=lambda parts: (
        [(pytree.GetAttrKey(name), part) for name, part in parts.items()],
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


def in_parts(value: Any) -> Any:
    """``value`` with the parts of each such object in it, for torch's tree functions."""
    kind = type(value)
    if kind in _LEAVES:  # Most, and each replay asks.
        return value
    if kind is BlockMask:
        names = (*BlockMask._TENSOR_ATTRS, *BlockMask._CONTEXT_ATTRS)
        parts = {name: getattr(value, name) for name in names}
        return Parts(BlockMask, parts | {"mask_mod": _opened(value.mask_mod, _DEPTH)})
    if kind is tuple or kind is list:
        return kind(map(in_parts, value))
    if kind is dict:
        return {key: in_parts(one) for key, one in value.items()}
    # One that is its items alone; Gemma 4 has such for keys and values.
    is_items = isinstance(value, UserDict) and kind.__init__ is UserDict.__init__
    if is_items and [*vars(value)] == ["data"] and all(type(key) is str for key in value):
        return Parts(kind, {key: in_parts(one) for key, one in value.items()})
    return value


def _opened(value: Any, depth: int) -> Any:
    """A ``mask_mod``, or what its closure holds; see Note [Block masks]."""
    if type(value) in (tuple, list):
        return type(value)(_opened(one, depth - 1) for one in value)
    if type(value) is not FunctionType or value.__defaults__ or value.__kwdefaults__ or not depth:
        return value
    whole, scope = _Function(value.__code__, value.__globals__), value.__globals__
    cells = cells_of(value).items()
    parts = {name: _opened(cell.cell_contents, depth - 1) for name, cell in cells}
    read = {name: scope[name] for name in _globals_of(whole.code) if name in scope}
    for name, one in read.items():
        if type(one) is FunctionType and not one.__closure__:
            parts[f"{name} (global)"] = _opened(one, depth - 1)
        elif not isinstance(one, _FIXED):
            # What cannot be compared is its class, which no graph takes.
            can_be_compared = all(map(is_plain, pytree.tree_leaves(one)))
            parts[f"{name} (global)"] = one if can_be_compared else type(one)
    return Parts(whole, parts)


@cache  # For each ``def``, since each call of a unit asks.
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of globals that a function reads, or one that it defines."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(dict.fromkeys([*names, *(name for one in inner for name in _globals_of(one))]))


def separate(module: nn.Module) -> Undo:
    """Give ``module`` views of its arguments, for ``separate_inputs`` of ``graph_units``.

    A view passes on one gradient, as a replay does, at the same place in autograd's order of nodes.
    """
    run = forward_of(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs), _is_leaf)
        views = {id(one): _view(one) for one in leaves}
        before = [views[id(one)] for one in leaves]
        given = pytree.tree_unflatten(before, spec)
        made = run(*given[0], **given[1])
        left, left_spec = pytree.tree_flatten(given, _is_leaf)
        if left_spec != spec or any(map(operator.is_not, left, before)):
            raise ConfigurationError([_FILLED])
        return made

    return replace_function(module, "forward", forward)


def _view(value: Any) -> Any:
    """A view of a tensor that needs a gradient; anything else itself."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    made = same_memory(value) if is_dense(value) else value
    vars(made).update({} if isinstance(value, nn.Parameter) else vars(value))
    return made


class _Expanded(Input):
    """One that is expanded in some dimensions; see Note [Expanded tensors]."""

    def __init__(self, tensor: torch.Tensor, dims: Sequence[int]) -> None:
        super().__init__(f"a tensor of shape {tuple(tensor.shape)}, expanded")
        self._shape, self._dims = tensor.shape, tuple(dims)

    def is_like(self, value: Any) -> bool:
        if not is_plain_tensor(value) or value.shape != self._shape:
            return False
        return all(value.stride(dim) == 0 for dim in self._dims)

    def to_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim in self._dims:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def from_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self._shape)


class _AliasOf(Mark):
    """A tensor that the call gives a second time, as code may ask; gradients of both are summed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"that of argument {name}")
        self.name = name
        """Where it is given first."""


_TENSOR = Input("a tensor")
_CONTAINERS = (tuple, list, dict, Parts)


@dataclass(frozen=True)
class CallSpec:
    positions: tuple[str, ...]
    """The names of the positional arguments."""
    keywords: tuple[str, ...]
    marks: Mapping[str, Any]
    """By name, a mark for each tensor, also inside of containers, and every constant itself."""
    specs: tuple[pytree.TreeSpec | None, ...]
    """The containers of each argument; None if it is no container."""
    twins: tuple[tuple[int, int], ...]
    """Each list, dict and object of these, and the first that is the same one, as code may ask."""

    @classmethod
    def of(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Self:
        """The form of ``forward(*args, **kwargs)``."""
        positions = tuple(positional_names(forward, len(args), kwargs))
        names = (*positions, *kwargs)
        values = [*map(in_parts, args), *map(in_parts, kwargs.values())]
        marks: dict[str, Any] = {}
        seen: dict[int, str] = {}
        for (place, *path), leaf in pytree.tree_leaves_with_path(values, is_leaf=_is_leaf):
            name = f"{names[place.idx]}{pytree.keystr(tuple(path))}"  # type: ignore[attr-defined]
            marks[name] = _AliasOf(seen[id(leaf)]) if id(leaf) in seen else _mark_of(leaf, name)
            if isinstance(marks[name], Input):
                seen[id(leaf)] = name
        specs = [None if _is_leaf(one) else pytree.tree_structure(one, _is_leaf) for one in values]
        twins = _twins([*args, *kwargs.values()], specs)
        return cls(positions, tuple(kwargs), marks, tuple(specs), twins)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors that a graph gets, in its order."""
        return tuple(name for name, mark in self.marks.items() if isinstance(mark, Input))

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[torch.Tensor], Mismatch | None]:
        """A call's tensors, and the first mismatch with this form."""
        leaves = self._leaves(args, kwargs)
        if isinstance(leaves, Mismatch):
            return (), leaves
        tensors: list[torch.Tensor] = []
        seen: dict[int, str] = {}
        for (name, mark), value in zip(self.marks.items(), leaves, strict=True):
            if mark is value:  # A flag or None, as most.
                continue
            again = seen.get(id(value))
            if isinstance(mark, Input):
                fits = again is None and mark.is_like(value)
            else:
                fits = again == mark.name if isinstance(mark, _AliasOf) else same_value(mark, value)
            if not fits:
                return (), _mismatch(name, mark, value if again is None else _AliasOf(again))
            if isinstance(mark, Input):
                seen[id(value)] = name
                tensors.append(mark.to_graph(value))
        return tensors, None

    def _leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | Mismatch:
        # Code may see the order of keywords.
        if len(args) != len(self.positions) or tuple(kwargs) != self.keywords:
            return Mismatch(
                "structure",
                "the way of its call",
                _way(self.positions, self.keywords),
                _way(args, kwargs),
                "Pass the same arguments, by position and in one order by name, in each step.",
            )
        given = [*args, *(kwargs[name] for name in self.keywords)]
        leaves: list[Any] = []
        names = (*self.positions, *self.keywords)
        for name, spec, value in zip(names, self.specs, map(in_parts, given), strict=True):
            if spec is None and _is_leaf(value):
                leaves.append(value)
                continue
            found, actual = pytree.tree_flatten(value, _is_leaf)
            if actual != spec:
                another = spec and Mark(f"another {spec.type.__name__}")
                return _mismatch(name, another or self.marks[name], value)
            leaves += found
        twins = _twins(given, self.specs) if self.twins else ()  # As many: the specs are the same.
        for (n, was), (_, now) in zip(self.twins, twins, strict=True):
            if was != now:
                return _mismatch(names[n], _AliasOf(names[was]), _AliasOf(names[now]))
        return leaves

    def join(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of a call with these tensors; the reverse of :meth:`split`."""
        of_graph = iter(tensors)
        given: dict[str, Any] = {}
        for name, mark in self.marks.items():
            if isinstance(mark, _AliasOf):
                given[name] = given[mark.name]
            else:
                given[name] = mark.from_graph(next(of_graph)) if isinstance(mark, Input) else mark
        left = iter(given.values())
        values = [
            next(left) if of is None else pytree.tree_unflatten(islice(left, of.num_leaves), of)
            for of in self.specs
        ]
        for n, first in self.twins:
            values[n] = values[first]
        count = len(self.positions)
        return tuple(values[:count]), dict(zip(self.keywords, values[count:], strict=True))

    def by_name(self, tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a call under their names, but for those that are expanded."""
        found = ((n, self.marks[n], one) for n, one in zip(self.names, tensors, strict=True))
        return {n: mark.from_graph(t) for n, mark, t in found if not isinstance(mark, _Expanded)}

    def problems(self) -> list[str]:
        """Why no graph can take this form, in words; empty if one can."""
        problems = [
            f"argument {name} is {_in_words(value)}"
            for name, value in self.marks.items()
            if not isinstance(value, Mark) and not is_plain(value)
        ]
        return problems if self.names else [*problems, "no argument is a tensor"]


def _way(args: Sequence[Any], kwargs: Iterable[str]) -> str:
    return f"with {len(args)} arguments by position, and by name {', '.join(kwargs) or 'none'}"


def _twins(given: Sequence[Any], specs: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    first: dict[int, int] = {}
    pairs = enumerate(zip(given, specs, strict=True))
    held = ((n, id(one)) for n, (one, spec) in pairs if spec and spec.type in _CONTAINERS[1:])
    return tuple((n, first.setdefault(key, n)) for n, key in held)


def _is_leaf(value: Any) -> bool:
    """Of a class of its own, a graph would give the unit a copy that the caller never sees.

    Nobody can change a named tuple.
    """
    kind = type(value)
    if kind in _CONTAINERS:
        return False
    return not (isinstance(value, tuple) and hasattr(kind, "_fields"))


def _mark_of(value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor) or not is_dense(value):
        return value
    if spec_of(value) is not None:
        return Layout(value, f"argument {name}") if is_plain_tensor(local(value)) else value
    if not is_plain_tensor(value) and not is_awaited(value):
        return value
    if is_awaited(value) or not (dims := _expanded_dims(value)):
        return _TENSOR
    return value if value.requires_grad else _Expanded(value, dims)


def _expanded_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions whose elements share memory."""
    pairs = enumerate(zip(tensor.stride(), tensor.shape, strict=True))
    return [dim for dim, (stride, size) in pairs if stride == 0 and size > 1]


def _in_words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return described(value)
    if not is_dense(value):
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        return f"a {kind} tensor and not dense"
    if spec_of(value) is not None:
        return repr(Layout(value, ""))
    if not is_plain_tensor(value):
        own = "a subclass of torch.Tensor whose methods no graph runs"
        if type(value) is nn.Parameter:
            own = "and code may ask for that: pass a view (w.view_as(w))"
        elif type(value) is torch.Tensor:
            own = f"with Python attributes that no graph passes on ({', '.join(vars(value))})"
        return f"a {type(value).__name__}, {own}"
    if value.requires_grad and _expanded_dims(value):
        return (
            f"an expanded tensor of shape {tuple(value.shape)} that needs a gradient; a graph's "
            "input needs memory of its own: pass .contiguous()"
        )
    return described(value)


def _mismatch(name: str, expected: Any, actual: Any) -> Mismatch:
    flips = "mask" in name and (expected is None or actual is None)
    return Mismatch(
        "structure",
        f"argument {name}",
        repr(expected) if isinstance(expected, Mark) else described(expected),
        repr(actual) if isinstance(actual, Mark) else _in_words(actual),
        _MASK if flips else _CONSTANT,
    )


def is_transformed() -> bool:
    """Whether a call made now gets the tensors of another way of differentiation."""
    return bool(_TRANSFORMED.cached()) or _LEVELS.cached._current_level >= 0


def is_trained(module: nn.Module) -> bool:
    """Whether a call made now is one that a replay may stand for."""
    return module.training and torch.is_grad_enabled() and not is_transformed()


_TRANSFORM = (
    "a replay computes the gradients of a backward pass alone",
    "transform a copy of the unit, or leave the unit out of units",
)
_SAVED_TENSORS = (
    "a replay saves no tensors for backward, so these hooks would get none of the unit's",
    "enter them around other modules alone, or leave the unit out of units",
)
_CHECKPOINT = (
    "activation checkpointing around the unit calls it again in the backward pass, on what it "
    "saved; a replay saves nothing",
    "leave the unit out of units, or put the checkpoint inside the unit",
)


def recompute_around() -> tuple[str, str, str] | None:
    """What shows that a call made now is, or will be, recomputed; None if nothing does.

    With the reason why it cannot be a replay, and what to do instead.
    """
    if is_transformed():
        return "under torch.func or forward-mode AD", *_TRANSFORM
    if in_backward_pass():
        return "inside a backward pass", *_CHECKPOINT
    hooks = _HOOKS.cached(False)  # False: also while a trace is made
    if hooks is None:
        return None
    pack = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__).partition(".__init__")[0]
    name = f"{getattr(hooks[0], '__module__', '')}.{pack}"
    cause = _CHECKPOINT if "checkpoint" in name else _SAVED_TENSORS
    return f"under saved-tensor hooks ({name})", *cause


def not_recomputed() -> Mismatch | None:
    """A mismatch if the call made now must not be a replay."""
    if (found := recompute_around()) is None:
        return None
    shown, reason, remedy = found
    return Mismatch(
        "recompute",
        "the place of its call",
        "outside of backward passes, saved-tensor hooks and torch.func",
        shown,
        f"{reason[0].upper()}{reason[1:]}. {remedy[0].upper()}{remedy[1:]}.",
    )
