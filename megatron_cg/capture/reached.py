"""What code reaches from a value: attributes, elements, functions, and the tensors behind them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dis import get_instructions
from functools import partial
from itertools import accumulate
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.depends_on import Entry
from megatron_cg.replay.plain import is_array, is_plain, same_value

KNOWN = frozenset({"megatron", "megatron_fsdp", "transformer_engine", "megatron_cg", "triton"})
LIBRARIES = KNOWN | {"torch", "numpy", "einops"} | sys.stdlib_module_names
_RECORDS = LIBRARIES - {"types", "argparse"}
"""Packages whose objects have nothing that a user sets, but those with namespaces."""
_PARTS = ("__func__", "__self__", "fget", "__wrapped__", "func", "args", "keywords")
"""Of methods, properties, what decorates a function, and partial functions."""
DEPTH = 4
Way = list[Entry]


def is_known(owner: Any, packages: frozenset[str] = KNOWN) -> bool:
    """Whether a module, a class, or the class of an object, is of one of ``packages``."""
    if isinstance(owner, ModuleType):
        return owner.__name__.partition(".")[0] in packages
    kind = owner if isinstance(owner, type) else type(owner)
    return (kind.__module__ or "").partition(".")[0] in packages


class _Items:
    """The elements of a list or tuple, with ``get`` as a dictionary has it."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def get(self, key: int) -> Any:
        return self._values[key] if key < len(self._values) else None


class Attributes:
    """Attributes of a class or an object, or the free variable of a function, as a dictionary."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, key: str) -> Any:
        """Its value; None if it has none."""
        try:
            return getattr(self._owner, key, None)
        except ValueError:  # A variable that is not set yet.
            return None

    def __setitem__(self, key: str, value: Any) -> None:
        kinds = getattr(self._owner, "__mro__", ())
        setattr(next((kind for kind in kinds if key in vars(kind)), self._owner), key, value)


def texts(constants: tuple[Any, ...]) -> Iterator[str]:
    """The strings among the constants of some code, at any depth."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from texts(tuple(constant))


def attribute(owner: str, name: str) -> str:
    """An attribute in words."""
    return f"{owner}.{name}" if owner else name


def item(owner: str, key: Any) -> str:
    """An element in words. The values of a tensor would be read on the host."""
    return f"{owner}[{key!r}]" if is_plain(key) else f"{owner}[a {type(key).__name__}]"


def held_by(value: Any, what: str) -> list[Entry]:
    """A row for each element of a container, or for each attribute of an object."""
    if isinstance(value, Mapping):
        return [Entry(value, key, "state", item(what, key)) for key in value]
    if isinstance(value, list | tuple):
        items = _Items(value)
        return [Entry(items, key, "state", f"{what}[{key}]") for key in range(len(value))]
    if isinstance(value, partial | MethodType):
        keys = ("args", "keywords") if isinstance(value, partial) else ("__self__",)
        return [Entry(Attributes(value), key, "state", attribute(what, key)) for key in keys]
    return attributes_of(value, what) if is_object(value) else []


def attributes_of(value: Any, what: str) -> list[Entry]:
    """A row for each attribute of an object, a class or a module; of classes for plain ones."""
    own: Any = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    rows = [Entry(own, key, "state", attribute(what, key)) for key in own]
    kinds = (*(value.__mro__ if isinstance(value, type) else ()), *type(value).__mro__)
    names: dict[str, str] = {}
    for kind in kinds if not isinstance(value, ModuleType) else ():
        for name in _data(kind) if not is_known(kind, LIBRARIES) else ():
            names.setdefault(name, kind.__name__ if isinstance(value, type) else what)
    found = Attributes(value)
    rows += [Entry(found, n, "state", attribute(of, n)) for n, of in names.items() if n not in own]
    return rows


def variables_of(function: FunctionType) -> list[Entry]:
    """A row for each free variable of a function, each attribute, and defaults that can change."""
    name, rows = function.__qualname__, list[Entry]()
    if str(function.__module__).partition(".")[0] in LIBRARIES:
        return rows
    for variable, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        if variable != "__class__":
            what = f"variable {variable} of {name}"
            rows.append(Entry(Attributes(cell), "cell_contents", "state", what))
    for key, held in (
        ("__defaults__", function.__defaults__),
        ("__kwdefaults__", function.__kwdefaults__),
    ):
        values = held.values() if isinstance(held, dict) else held or ()
        if not all(map(is_plain, values)):
            rows.append(Entry(Attributes(function), key, "state", f"the defaults of {name}"))
    own = vars(function)
    return rows + [Entry(own, key, "state", f"attribute {name}.{key}") for key in own]


def imported_by(code: CodeType, package: str) -> Iterator[str]:
    """The names that the modules may have that some code imports while it runs."""
    parents = ["", *accumulate(package.split("."), "{}.{}".format)]
    if "import_module" in code.co_names:
        yield from texts(code.co_consts)
    for one in get_instructions(code):
        if one.opname == "IMPORT_NAME":
            yield from (f"{parent}.{one.argval}".strip(".") for parent in parents)


def _data(kind: type) -> Iterator[str]:
    """The names of what a class holds besides functions, and of slots for what its objects hold."""
    for name, value in vars(kind).items():
        is_slot = isinstance(value, MemberDescriptorType)
        if is_slot or not (callable(value) or hasattr(value, "__get__") or name[:2] == "__"):
            yield name


def is_object(value: Any) -> bool:
    """Whether it is an object of a class that users write, or of one like theirs."""
    others = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType, partial)
    if is_plain(value) or isinstance(value, others) or is_known(value, _RECORDS):
        return False
    kinds = type(value).__mro__
    return isinstance(getattr(value, "__dict__", None), dict) or any(
        "__slots__" in vars(kind) for kind in kinds if not is_known(kind, LIBRARIES)
    )


def parts_of(value: Any) -> list[Any]:
    """The parts of a function, method, property or the like, which a call of it runs or reads."""
    own = getattr(value, "__dict__", {})
    return [getattr(value, n) for n in _PARTS if hasattr(type(value), n) or n in own]


def functions_in(value: Any, depth: int = DEPTH) -> Iterator[FunctionType]:
    """The Python functions that a call of ``value`` runs first."""
    if isinstance(value, FunctionType):
        yield value
    elif depth and not isinstance(value, torch.Tensor | nn.Module):
        for part in parts_of(value):
            yield from functions_in(part, depth - 1)


def ways(
    value: Any, way: Way, matches: Callable[[torch.Tensor], bool], depth: int
) -> Iterator[Way]:
    """The ways from a value to tensors, each behind ``way``."""
    if isinstance(value, torch.Tensor):
        if matches(value):
            yield [*way[:-1], Entry(way[-1].holder, way[-1].key, "attribute", way[-1].what)]
        return
    for row in held_by(value, way[-1].what) if depth else ():
        yield from ways(row.holder.get(row.key), [*way, row], matches, depth - 1)


def restored_to(holder: Any, before: Any) -> None:
    """Restore a dictionary, list or set to what it had ``before``."""
    if isinstance(holder, dict):
        for key in [key for key in holder if key not in before]:
            del holder[key]
        for key, value in before.items():
            if holder.get(key) is not value:
                holder[key] = value
    elif isinstance(holder, list):
        if not same_value([*map(id, holder)], [*map(id, before)]):
            holder[:] = before
    elif is_array(holder):
        if not same_value(holder, before):  # It may be read-only.
            holder[...] = before
    elif holder != before:
        holder.clear()
        holder.update(before)
