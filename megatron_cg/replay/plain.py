"""Plain Python values that a forward pass reads: compared by type and exact value.

A graph was captured with the branches and numbers that such values led to, and a replay repeats
them. ``==`` is not enough: 0.0 equals -0.0, 1 equals True, and NaN does not equal itself.
"""

import operator
import sys
import sysconfig
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from enum import Enum
from functools import partial
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

KNOWN = frozenset({"megatron", "megatron_fsdp", "transformer_engine", "megatron_cg", "triton"})
LIBRARIES = KNOWN | {"torch", "numpy", "einops"} | sys.stdlib_module_names
RECORDS = LIBRARIES - {"types", "argparse", "_thread", "threading"}
"""Packages whose objects have nothing that a user sets, but namespaces, threading.local and
Event."""

_STDLIB = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, Enum)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_SEQUENCES = (tuple, list, deque, array, bytearray, UserList)
MAPPINGS = (dict, MappingProxyType, UserDict, ChainMap, WeakKeyDictionary, WeakValueDictionary)
"""Of a user's own mapping the attributes count, as those of other objects."""
_SETS = (set, frozenset, WeakSet)
_LARGE = 1 << 16
"""Bytes of an array beyond which it counts by identity."""
_DEPTH = 6
"""How deep containers inside of containers are looked at."""


class _Identity:
    """Equal to itself for the same object only; keeps the object, so that no other gets its id."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def is_plain(value: Any) -> bool:
    """Whether ``value`` is of a type without parts, whose value cannot change in place."""
    return isinstance(value, (*_PLAIN, *_OF_TORCH))


def is_array(value: Any) -> bool:
    """Whether it is an array or a number of NumPy that is small enough to be compared."""
    return type(value).__module__ == "numpy" and getattr(value, "nbytes", _LARGE) < _LARGE


def is_container(value: Any) -> bool:
    """Whether :func:`contents` looks into ``value``."""
    return isinstance(value, (*_SEQUENCES, *_SETS, *MAPPINGS)) or is_array(value)


def same_value(value: Any, other: Any) -> bool:
    """Whether two values, of any type, are the same for a forward pass that reads them."""
    if value is other:
        return True
    if type(value) is not type(other) or not (is_plain(value) or is_container(value)):
        return False
    return bool(contents(value) == contents(other))


def contents(value: Any, depth: int = _DEPTH) -> Any:
    """What of ``value`` a forward pass can depend on, comparable with ``==``.

    Objects that are neither plain nor containers count by identity, as tensors do.
    """
    if is_plain(value):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if depth and isinstance(value, _SEQUENCES):
        return type(value), tuple([contents(inner, depth - 1) for inner in value])
    if depth and isinstance(value, MAPPINGS):
        pairs = [(contents(key, 1), contents(part, depth - 1)) for key, part in value.items()]
        return type(value), tuple(pairs)
    if depth and isinstance(value, _SETS):
        return type(value), frozenset([contents(inner, depth - 1) for inner in value])
    if is_array(value):
        return type(value), str(value.dtype), value.shape, value.tobytes()
    return _Identity(value)


class Contents:
    """The contents of a container at one time.

    Comparing them costs 10 us or more for each container. As long as the same objects are in it,
    at about 0.3 us, they are the same: objects without parts cannot change.
    """

    def __init__(self, value: Any) -> None:
        self._was = contents(value)
        self._look_at(value)

    @property
    def can_change(self) -> bool:
        """Whether the value, or a value inside, can be changed in place."""
        return bool(self._parts) or self._has_array

    def are_in(self, value: Any) -> bool:
        """Whether a value, the same object or another one, has the same contents."""
        if value is self._value and not self._has_array:
            for part, values, before in self._parts:
                now = [*part] if values is None else [*part, *values()]
                if len(now) != len(before) or not all(map(operator.is_, now, before)):
                    break
            else:
                return True
        if contents(value) != self._was:
            return False
        self._look_at(value)
        return True

    def _look_at(self, value: Any) -> None:
        self._value, self._parts = value, list[tuple[Any, Any, list[Any]]]()
        self._has_array = False
        for part in _changeable(value, _DEPTH):
            if is_array(part):
                self._has_array = True
                continue
            values = part.values if isinstance(part, MAPPINGS) else None
            self._parts.append((part, values, [*part, *(values() if values else ())]))


def _changeable(value: Any, depth: int) -> Iterator[Any]:
    """The containers that :func:`contents` looks into and that can change, ``value`` included."""
    if is_array(value) and hasattr(value, "__setitem__"):  # Its numbers cannot change.
        yield value
    if not depth or not is_container(value) or is_array(value):
        return
    if not isinstance(value, tuple | frozenset):
        yield value
    for inner in elements(value):
        yield from _changeable(inner, depth - 1)


def elements(container: Any) -> Any:
    """What a container holds; of a mapping the values."""
    return container.values() if isinstance(container, MAPPINGS) else container


def restore_contents(holder: Any, before: Any) -> None:
    """Let a container have the same objects as ``before``, in that order."""
    if isinstance(holder, dict):
        if [*map(id, holder)] != [*map(id, before)]:  # The order of keys may be that of a sum.
            holder.clear()
        for key, value in before.items():  # Threads may read what stays.
            if key not in holder or holder.get(key) is not value:
                holder[key] = value
    elif isinstance(holder, list | deque):
        if [*map(id, holder)] != [*map(id, before)]:
            holder.clear()
            holder.extend(before)
    elif isinstance(holder, array | bytearray):
        holder[:] = before
    elif is_array(holder):
        if not same_value(holder, before):  # It may be read-only.
            holder[...] = before
    elif {*map(id, holder)} != {*map(id, before)}:
        holder.clear()
        holder.update(before)


def is_known(owner: Any, packages: frozenset[str] = KNOWN) -> bool:
    """Whether a module, a class, or the class of an object, is of one of ``packages``.

    FSDP2 and ``torch.nn.utils.parametrize`` make a class of torch's from each class of a user: who
    makes a class at run time has not written its bases. If it has a metaclass of ``abc``, as
    Megatron's layers have, it is one of ``abc``, and its first base tells who has made it.
    """
    if isinstance(owner, ModuleType):
        return package_of(owner.__name__) in packages
    kind = owner if isinstance(owner, type) else type(owner)
    module = next(each.__module__ for each in kind.__mro__ if each.__module__ != "abc")
    if package_of(module) not in packages:
        return False
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind:
        return True
    has_code = "forward" in vars(kind) or any(map(is_users_function, vars(kind).values()))
    return not has_code and all(package_of(one.__module__) in LIBRARIES for one in kind.__mro__)


def is_users_function(value: Any) -> bool:
    """Whether a user wrote the function, that of a method or partial, or a callable's class."""
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    if isinstance(value, type | ModuleType | torch.nn.Module) or not callable(value):
        return False
    made = {value.__globals__.get("__name__")} if isinstance(value, FunctionType) else set[str]()
    owner = value if made else type(value)  # ``functools.wraps`` gives it another's module.
    return any(package_of(name) not in LIBRARIES for name in (owner.__module__, *made))


def users_parts(module: Any) -> Iterator[tuple[str, Any]]:
    """What users wrote on a module, and but for constructors on its classes below torch's own."""
    kinds = type(module).__mro__
    for held in map(vars, (module, *kinds[: kinds.index(torch.nn.Module)])):
        names = [name for name in held if name != "__init__"]
        yield from ((name, held[name]) for name in names if is_users_function(held[name]))


def package_of(module: str | None) -> str:
    """The package of a module of this name, which a user may have given a name of Python's own."""
    package = (module or "").partition(".")[0]
    found = sys.modules.get(package) if package in sys.stdlib_module_names else None
    # Python's own modules have a file there, or are built in; a folder without a file is a user's.
    file = getattr(found, "__file__", None) or ("/" if hasattr(found, "__path__") else _STDLIB[0])
    is_own = file.startswith(_STDLIB) and "site-packages" not in file
    return package if is_own else f"user's {package}"


def attribute(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def is_deep(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a container in it that can change lies deeper than :func:`contents` looks."""
    if not is_container(value) or is_array(value):
        return False
    if not depth:
        return next(_changeable(value, _DEPTH), None) is not None
    return any(is_deep(one, depth - 1) for one in elements(value))
