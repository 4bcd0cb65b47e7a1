"""The Python state that a unit's code reads: what it is, whether a pass changes it, how to undo it.

While a pass runs, a profile function notes each Python function that is called: which names its
code has (attributes and globals that it may read) and its globals. State that no such code can name
is nobody's business: a loop may count whatever it wants.

Packages in :data:`KNOWN` are trusted with their own globals and objects, since rules of this
package say what they read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.depends_on import Entry
from megatron_cg.replay.plain import is_plain, same_value
from megatron_cg.upstream.patch import put_over, undone_after

KNOWN = frozenset({"megatron", "megatron_fsdp", "transformer_engine", "megatron_cg", "triton"})
_LIBRARIES = KNOWN | {"torch", "numpy", "einops"} | sys.stdlib_module_names
_INTERNAL = frozenset(vars(nn.Module())) | {
    *("forward", "cuda_graphs", "cuda_graph_manual_hooks", "_should_call_te_cudagraph"),
    *("__deepcopy__", "__reduce_ex__", "_is_full_backward_hook"),
}
"""Attributes of modules that have rows of their own, or that this package sets."""
_BY_TEXT = {"getattr", "vars", "__dict__"}
_TRANSFORMERS = frozenset({"transformers"})
_OF_CHECKPOINTS = {"architectures", "dtype"}
"""What ``save_pretrained`` of transformers sets in a model's configuration, for the file alone."""
_DEPTH = 4
_Way = list[Entry]


def is_known(owner: Any, packages: frozenset[str] = KNOWN) -> bool:
    """Whether a class, or the class of an object, is of one of ``packages``."""
    kind = owner if isinstance(owner, type) else type(owner)
    return (kind.__module__ or "").partition(".")[0] in packages


class _Items:
    """The elements of a list or tuple, with ``get`` as a dictionary has it."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def get(self, key: int) -> Any:
        return self._values[key] if key < len(self._values) else None


class _Attributes:
    """The attributes of a class itself, or the free variable of a function, as a dictionary."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, key: str) -> Any:
        try:
            return getattr(self._owner, key, None)
        except ValueError:  # A variable that is not set yet.
            return None

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._owner, key, value)


@dataclass(frozen=True)
class Change:
    """A value that a pass has set."""

    holder: Any
    key: Any
    what: str
    before: Any
    after: Any


class PythonState:
    """The state that passes of some modules read; ``modules`` are those of a graph, by path."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self.names: set[str] = set()
        """All names in the code that was called."""
        self.own_names: set[str] = set()
        """Those in code of no library, which may ask whether there is such an attribute."""
        self._any_name = False
        """Whether code may read attributes by names that it computes."""
        self.asks_for_gradients = False
        """Whether code asks for ``requires_grad``, as torch's reentrant checkpoint does."""
        self._functions: list[Callable[..., Any]] = []
        self._codes: dict[int, CodeType] = {}
        self._globals: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self._copies: dict[int, tuple[Any, Any, str, bool]] = {}
        """By id: a dictionary, list or set, its shallow copy, what it is, and whether it has the
        attributes of an object."""
        self._values: list[tuple[Any, Any, str, Any]] = []
        """Holder, key and value of what lies elsewhere than in a module."""
        self._profile: Any = None

    def add(self, function: Callable[..., Any]) -> None:
        """Observe a function too that is called from elsewhere, such as a hook."""
        self._functions.append(function)
        for called in _functions_in(function):
            self._note(called.__code__, called.__globals__)

    def begin(self) -> None:
        """A pass begins: copy what it may change, and note what it calls."""
        self._copy_all()
        self._profile = sys.getprofile()
        sys.setprofile(self._called)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore on exit what passes in the block change."""
        self._copy_all()
        restore = self.restorer()
        try:
            yield
        finally:
            restore()

    def _copy_all(self) -> None:
        self._copies.clear()
        self._values = [(h, k, what, h.get(k)) for h, k, what in self._elsewhere()]
        for _, _, what, value in self._values:
            self._copy(value, what)
        for function in self._functions:
            self._copy(getattr(function, "__self__", None), "attribute")
        for path, module in self._modules.items():
            if not is_known(module):
                self._copies[id(vars(module))] = vars(module), dict(vars(module)), path, True
                for name in vars(module).keys() - _INTERNAL:
                    self._copy(vars(module)[name], _attribute(path, name))

    def end(self) -> None:
        """The pass has ended."""
        sys.setprofile(self._profile)

    def changes(self) -> Iterator[Change]:
        """What the last pass has set, of all that its code can name."""
        for holder, key, what, before in self._values:
            if not same_value(before, holder.get(key)):
                yield Change(holder, key, what, before, holder.get(key))
        for holder, before, what, is_object in self._copies.values():
            if not isinstance(holder, dict):
                if not same_value(before, holder):
                    yield Change(holder, None, what, before, holder)
                continue
            for key in {**before, **holder}:
                matters = not is_object or self._is_read(key)
                if matters and not same_value(before.get(key), holder.get(key)):
                    label = _attribute(what, key) if is_object else _item(what, key)
                    yield Change(holder, key, label, before.get(key), holder.get(key))

    def restorer(self) -> Callable[[], None]:
        """Returns a function that restores what the last pass found when it began."""
        copies, values = list(self._copies.values()), list(self._values)

        def restore() -> None:
            for holder, before, *_ in copies:
                _restore(holder, before)
            for holder, key, _, before in values:
                if holder.get(key) is not before:
                    holder[key] = before

        return restore

    def entries(self) -> Iterator[Entry]:
        """The rows of the table: values and tensors that the code reads, at any depth."""
        seen: set[int] = set()
        for holder, key, what in self._roots():
            value = holder.get(key)
            if isinstance(value, nn.Parameter | nn.Module | ModuleType | property):
                continue
            clause = "attribute" if isinstance(value, torch.Tensor) else "state"
            yield Entry(holder, key, clause, what)
            yield from self._inside(value, what, seen)

    def ways(self, matches: Callable[[torch.Tensor], bool]) -> Iterator[_Way]:
        """The ways by which the code reaches tensors; each is a list of rows."""
        for holder, key, what in self._roots():
            way = [Entry(holder, key, "state", what)]
            yield from _ways(holder.get(key), way, matches, _DEPTH)

    def _is_read(self, name: str) -> bool:
        return (self._any_name or name in self.names) and name not in _INTERNAL

    def _roots(self) -> Iterator[tuple[Any, Any, str]]:
        for path, module in self._modules.items():
            if not is_known(module):
                for name in [*vars(module)]:
                    if self._is_read(name):
                        yield vars(module), name, f"attribute {_attribute(path, name)}"
        yield from self._elsewhere()

    def _elsewhere(self) -> Iterator[tuple[Any, Any, str]]:
        """Those that are no attributes of a module: of classes, globals, and free variables."""
        yield from self._globals.values()
        functions = [holder.get(name) for holder, name, _ in self._globals.values()]
        functions += self._functions
        pairs = ((type(m), kind) for m in self._modules.values() for kind in type(m).__mro__)
        for top, kind in dict.fromkeys(pairs):
            if is_known(kind, _LIBRARIES):
                continue
            for name, value in [*vars(kind).items()]:
                functions.append(value)
                if self._is_read(name) and not callable(value) and not hasattr(value, "__get__"):
                    # A class may get one of its own, which hides that of the class below it.
                    for owner in dict.fromkeys((kind, top)):
                        yield _Attributes(owner), name, f"attribute {kind.__name__}.{name}"
        for module in self._modules.values():
            if not is_known(module, _LIBRARIES):
                functions += vars(module).values()
        seen: set[int] = set()
        for function in functions:
            yield from self._free_variables(function, seen)

    def _free_variables(self, value: Any, seen: set[int]) -> Iterator[tuple[Any, Any, str]]:
        """The free variables of a function that was called, and of those in its free variables."""
        for function in _functions_in(value):
            if id(function) in seen or id(function.__code__) not in self._codes:
                continue
            seen.add(id(function))
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            for name, cell in cells:
                holder = _Attributes(cell)
                inner = holder.get("cell_contents")
                if isinstance(inner, type | ModuleType):
                    continue
                if not isinstance(inner, FunctionType | nn.Module):
                    yield holder, "cell_contents", f"variable {name} of {function.__qualname__}"
                yield from self._free_variables(inner, seen)

    def _inside(self, value: Any, what: str, seen: set[int]) -> Iterator[Entry]:
        """The attributes of plain objects, such as a configuration."""
        if not _is_object(value) or id(value) in seen or len(seen) > 99:
            return
        seen.add(id(value))
        kinds = (k for k in type(value).__mro__ if k.__name__.lower() == "pretrainedconfig")
        of_transformers = any(is_known(k, _TRANSFORMERS) for k in kinds)
        written = _OF_CHECKPOINTS if of_transformers else ()
        for row in _attributes_of(value, what):
            if self._is_read(row.key) and row.key not in written:
                yield row
                yield from self._inside(row.holder[row.key], row.what, seen)

    def _copy(self, value: Any, what: str, depth: int = _DEPTH) -> None:
        is_object = _is_object(value)
        held = vars(value) if is_object else value
        if not depth or id(held) in self._copies:
            return
        if isinstance(held, list | dict | set):
            self._copies[id(held)] = held, copy.copy(held), what, is_object
        for row in _attributes_of(value, what) if is_object else _held_by(value, what):
            self._copy(row.holder.get(row.key), row.what, depth - 1)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and id(frame.f_code) not in self._codes:
            self._note(frame.f_code, frame.f_globals)

    def _note(self, code: CodeType, names: dict[str, Any]) -> None:
        self._codes[id(code)] = code
        self.names.update(code.co_names, _texts(code.co_consts))
        module = str(names.get("__name__"))
        package = module.partition(".")[0]
        # torch.autograd itself asks at the start of each backward pass.
        own = package == "megatron_cg" or module == "torch.autograd"
        self.asks_for_gradients |= not own and "requires_grad" in code.co_names
        if package in _LIBRARIES:
            return
        self.own_names.update(code.co_names, _texts(code.co_consts))
        self._any_name = self._any_name or not _BY_TEXT.isdisjoint(code.co_names)
        for name in code.co_names:
            value = names.get(name, self)
            key = id(names), name
            if value is self or isinstance(value, ModuleType | type) or key in self._globals:
                continue
            what = f"global {name} of {names.get('__name__')}"
            self._globals[key] = names, name, what
            self._values.append((*self._globals[key], value))
            self._copy(value, what)


def tensor_hooks_observed(notice: Callable[[Change], None]) -> AbstractContextManager[None]:
    """Observe the hooks on tensors that are registered in the block, whenever they are called.

    Their operations on gradients are in the graph like all others. But a replay runs no Python, so
    what else they do would be lost. ``notice`` gets each change of Python state that one of them
    makes. It is undone.
    """
    original = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        state = PythonState({})
        state.add(hook)

        def called(gradient: torch.Tensor) -> Any:
            state.begin()
            try:
                return hook(gradient)
            finally:
                state.end()
                for change in state.changes():
                    notice(change)
                state.restorer()()

        return original(tensor, called)  # type: ignore[no-untyped-call]

    return undone_after(put_over(torch.Tensor, "register_hook", register_hook))


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    """The strings among the constants of some code, at any depth."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _texts(tuple(constant))


def _attribute(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _item(owner: str, key: Any) -> str:
    # The values of a tensor would be read on the host.
    return f"{owner}[{key!r}]" if is_plain(key) else f"{owner}[a {type(key).__name__}]"


def _held_by(value: Any, what: str) -> list[Entry]:
    if isinstance(value, Mapping):
        return [Entry(value, key, "state", _item(what, key)) for key in value]
    if isinstance(value, list | tuple):
        items = _Items(value)
        return [Entry(items, key, "state", f"{what}[{key}]") for key in range(len(value))]
    return _attributes_of(value, what) if _is_object(value) else []


def _attributes_of(value: Any, what: str) -> list[Entry]:
    return [Entry(vars(value), key, "state", _attribute(what, key)) for key in vars(value)]


def _is_object(value: Any) -> bool:
    others = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType, partial)
    if is_plain(value) or isinstance(value, others) or is_known(value, _LIBRARIES - {"types"}):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _functions_in(value: Any, depth: int = _DEPTH) -> Iterator[FunctionType]:
    """The Python functions that a call of ``value`` runs first."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            yield from _functions_in(inner, depth - 1) if depth else ()
    elif depth and not isinstance(value, torch.Tensor | nn.Module):
        for name in ("__func__", "fget", "__wrapped__"):
            inner = getattr(value, name, None) if hasattr(type(value), name) else None
            if inner is not None:
                yield from _functions_in(inner, depth - 1)


def _ways(
    value: Any, way: _Way, matches: Callable[[torch.Tensor], bool], depth: int
) -> Iterator[_Way]:
    if isinstance(value, torch.Tensor):
        if matches(value):
            yield [*way[:-1], Entry(way[-1].holder, way[-1].key, "attribute", way[-1].what)]
        return
    for row in _held_by(value, way[-1].what) if depth else ():
        yield from _ways(row.holder.get(row.key), [*way, row], matches, depth - 1)


def _restore(holder: Any, before: Any) -> None:
    if isinstance(holder, dict):
        for key in [key for key in holder if key not in before]:
            del holder[key]
        for key, value in before.items():
            if holder.get(key) is not value:
                holder[key] = value
    elif isinstance(holder, list):
        if not same_value([*map(id, holder)], [*map(id, before)]):
            holder[:] = before
    elif holder != before:
        holder.clear()
        holder.update(before)
