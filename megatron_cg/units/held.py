"""What Python objects and code hold, as rows of the guard, and how that is restored."""

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from configparser import RawConfigParser, SectionProxy
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dis import get_instructions
from functools import partial
from itertools import accumulate
from logging import Logger
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import CallableProxyType, ProxyType, ReferenceType

import numpy
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import SUPPORTED_NODES

from megatron_cg.replay.guard import Entry
from megatron_cg.replay.plain import (
    LIBRARIES,
    MAPPINGS,
    RECORDS,
    attribute,
    elements,
    is_array,
    is_container,
    is_known,
    is_plain,
    package_of,
)
from megatron_cg.upstream.patch import IN_CELL, cells_of

_PARTS = ("__func__", "__self__", "fget", "__wrapped__", "func", "args", "keywords")
"""Of methods, properties, what decorates a function, and partial functions."""
DEPTH = 4
INTERNAL = frozenset(vars(nn.Module())) | {
    *("forward", "cuda_graphs", "cuda_graph_manual_hooks", "_should_call_te_cudagraph"),
    *("_megatron_cg_session", "_unshard_event", "_ready_grad_parameters", "pre_forward"),
    *("__deepcopy__", "__reduce_ex__", "_is_full_backward_hook", "post_backward"),
}
"""Attributes of modules that have rows of their own, or that this package or v2 sets."""
_OPEN = (nn.Module, torch.optim.Optimizer, LRScheduler, GradScaler, RawConfigParser, SectionProxy)
"""Classes of torch and Python whose objects have something that users set."""


class Attributes:
    """Attributes of a class or an object, the free variable of a function, or what a list holds.

    With ``place``, of what is now at that place of a dictionary.
    """

    def __init__(self, owner: Any, place: str | None = None) -> None:
        self._of: Callable[[], Any] = lambda: owner if place is None else owner.get(place)

    def get(self, key: Any) -> Any:
        owner = self._of()
        if key == "level" and isinstance(owner, Logger):  # From which it writes.
            return owner.disabled or max(owner.manager.disable + 1, owner.getEffectiveLevel())
        try:
            return owner[key] if isinstance(key, int) else getattr(owner, key, None)
        except (ValueError, LookupError):  # A variable that is not set yet, an item that is gone.
            return None

    def __setitem__(self, key: str, value: Any) -> None:
        kinds = getattr(owner := self._of(), "__mro__", ())
        setattr(next((kind for kind in kinds if key in vars(kind)), owner), key, value)


def random_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What reads and sets the state of a generator, or of a module of functions; None for others.

    It can be pickled.
    """
    if value is random or isinstance(value, random.Random):
        return value.getstate, value.setstate
    if value is numpy.random or isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, torch.Generator):  # Tensors are pickled with ids.
        write = value.set_state
        return lambda: value.get_state().numpy(), lambda state: write(torch.from_numpy(state))
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from texts(tuple(constant))


def item(owner: str, key: Any) -> str:
    """An element in words. The values of a tensor would be read on the host."""
    return f"{owner}[{key!r}]" if is_plain(key) else f"{owner}[a {type(key).__name__}]"


def held_by(value: Any, what: str) -> list[Entry]:
    """A row for each element of a container, or for each attribute of an object."""
    if isinstance(value, MAPPINGS):
        rows = [Entry(value, key, "state", item(what, key)) for key in value]
        return [*rows, *attributes_of(value, what)] if is_object(value) else rows
    if isinstance(value, ContextVar):
        return [Entry(value, None, "state", what)]
    if isinstance(value, list | tuple | deque):
        items = Attributes(value)
        return [Entry(items, key, "state", f"{what}[{key}]") for key in range(len(value))]
    if isinstance(value, partial | MethodType):
        keys = ["args", "keywords"] if isinstance(value, partial) else ["__self__"]
        keys += ["func"] * (type(value) is partial)  # Not of those that replace functions here.
        return [Entry(Attributes(value), key, "state", attribute(what, key)) for key in keys]
    return attributes_of(value, what) if is_object(value) else []


def attributes_of(value: Any, what: str) -> list[Entry]:
    """A row for each attribute of an object, a class or a module; of classes for plain ones."""
    own: Any = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    hidden = INTERNAL if isinstance(value, nn.Module) else ()
    rows = [Entry(own, key, "state", attribute(what, key)) for key in own if key not in hidden]
    if isinstance(value, nn.Module):
        rows += [Entry(value._modules, n, "state", attribute(what, n)) for n in value._modules]
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
    if package_of(function.__module__) in LIBRARIES:
        return rows
    for variable, cell in cells_of(function).items():
        if variable != "__class__":
            what = f"variable {variable} of {name}"
            rows.append(Entry(Attributes(cell), IN_CELL, "state", what))
    for key in ("__defaults__", "__kwdefaults__"):
        if getattr(function, key):
            rows.append(Entry(Attributes(function), key, "state", f"the defaults of {name}"))
    own = vars(function)
    return rows + [Entry(own, key, "state", f"attribute {name}.{key}") for key in own]


def imported_by(code: CodeType, package: str) -> Iterator[str]:
    """The names that the modules may have that some code imports while it runs."""
    parents = ["", *accumulate(package.split("."), "{}.{}".format)]
    if not {"import_module", "modules"}.isdisjoint(code.co_names):
        yield from texts(code.co_consts)
    for one in get_instructions(code):
        if one.opname == "IMPORT_NAME":
            yield from (f"{parent}.{one.argval}".strip(".") for parent in parents)


def _data(kind: type) -> Iterator[str]:
    """The names of what a class holds besides functions, and of slots for what its objects hold."""
    for name, value in vars(kind).items():
        is_slot = isinstance(value, MemberDescriptorType)
        if is_slot or not (callable(value) or hasattr(type(value), "__get__") or name[:2] == "__"):
            yield name


def is_object(value: Any) -> bool:
    """Whether it is an object of a class that users write, or of one like theirs."""
    others = (torch.Tensor, type, ModuleType, FunctionType, MethodType, partial)
    kinds = type(value).__mro__
    if is_plain(value) or isinstance(value, others):
        return False
    # Users read and schedule the fields of Megatron's configs.
    is_config = "ModelParallelConfig" in [kind.__name__ for kind in kinds]
    is_closed = is_known(value) or (not isinstance(value, _OPEN) and is_known(value, RECORDS))
    if is_closed and not is_config:
        return False
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


def leaves_held(value: Any, inside: tuple[int, ...] = ()) -> Iterator[Any]:
    """The value, or what is in a container or in what torch's trees open, at any depth.

    ``inside`` are the ids of what it is in, which it may hold in turn.
    """
    value = referred(value)
    if is_container(value) and not is_array(value):
        parts = elements(value)
    elif type(value) in SUPPORTED_NODES:
        parts, _ = SUPPORTED_NODES[type(value)].flatten_fn(value)
    else:
        yield value
        return
    if id(value) not in inside:
        for part in parts:
            yield from leaves_held(part, (*inside, id(value)))


def referred(value: Any) -> Any:
    """What a weak reference refers to, or the value itself."""
    if isinstance(value, ProxyType | CallableProxyType):
        with suppress(ReferenceError):
            found: Any = value.__init__
            return found.__self__
    return value() if isinstance(value, ReferenceType) else value


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """In the block, the garbage collector lists what a script has frozen too (``gc.freeze``).

    Garbage is collected before, where that visits no frozen object, and not frozen with the others.
    """
    with ExitStack() as undo:
        if gc.get_freeze_count():
            gc.collect()
            gc.unfreeze()
            undo.callback(gc.freeze)
        yield


def instances(kind: type) -> list[Any]:
    """All objects of a class that the garbage collector knows; call it in ``nothing_frozen``."""
    objects = gc.get_objects()
    # Objects are many, their classes few.
    kinds = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds]
