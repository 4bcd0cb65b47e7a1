"""The Python state that a unit's code reads: what it is, whether a pass changes it, how to undo it.

While a pass runs, a profile function notes each Python function that is called: which names its
code has (attributes and globals that it may read) and its globals. Other state is not looked at.
Packages in :data:`LIBRARIES` are trusted with their own globals: rules say what they read.
"""

import copy
import operator
import os
import pickle
import random
import sys
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dis import get_instructions
from functools import partial
from itertools import product
from logging import Logger
from operator import attrgetter, methodcaller
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet, ref

import numpy
import torch
from torch import nn

from megatron_cg.hooks import MODULE_REGISTRIES, RECORDER
from megatron_cg.replay.guard import Entry, KeySet
from megatron_cg.replay.plain import (
    LIBRARIES,
    MAPPINGS,
    attribute,
    is_array,
    is_known,
    is_plain,
    package_of,
    restore_contents,
    same_value,
    users_parts,
)
from megatron_cg.replay.settings import OF_FSDP
from megatron_cg.restore import Restores
from megatron_cg.units import held
from megatron_cg.upstream.patch import undone_after

_CALL, _READS_VARIABLE = nn.Module._call_impl.__code__, type(os.environ).__getitem__.__code__
_ASK_LEVEL = {"isEnabledFor", "getEffectiveLevel", "level"}
_ASK, _DUMP = {"getattr", "hasattr"}, {"asdict", "astuple", "model_dump"}
_BY_TEXT = {*_ASK, *_DUMP, "setattr", "vars", "dir", "__dict__", "attrgetter"}
_BY_TEXT |= {"__getattribute__", "__setattr__"}
_COPIED = (list, deque, dict, set, WeakSet, array, bytearray)
_CALLED, _FROM_ENVIRONMENT = {"forward", "__call__"}, {"environ", "getenv"}
_MOST = 20_000
"""Objects and containers that are looked at."""
_OF_CHECKPOINTS = {"architectures", "dtype"}
"""What ``save_pretrained`` of transformers sets in a model's configuration, for the file alone."""


class PythonState:
    """The state that passes of some modules read; ``modules`` are those of a graph, by path.

    Others that passes call are looked at too, but for those ``around`` them. Of ``layer``, which is
    not in the graph, code of Megatron sets attributes: those count that users' code may name.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        around: Iterable[nn.Module] = (),
        layer: nn.Module | None = None,
    ) -> None:
        self._of_layer, self._layer = {} if layer is None else vars(layer), type(layer)
        known = [one for k in type(layer).__mro__ if is_known(k) for one in vars(k).values()]
        codes = [function.__code__ for one in known for function in held.functions_in(one)]
        names = {n for code in codes for n in (*code.co_names, *held.texts(code.co_consts))}
        self._of_known = held.INTERNAL.union(names, OF_FSDP)
        """With the names in code of the layer's known classes, such as ``current_microbatch``."""
        self._modules, self._inner = dict(modules), {*map(id, (*modules.values(), *around))}
        known_modules = [pair for pair in modules.items() if is_known(pair[1], LIBRARIES)]
        self._of_users = [(path, m, [*users_parts(m)]) for path, m in known_modules]
        """What users wrote on modules of known classes."""
        self._calls: dict[int, ref[nn.Module]] = {}
        """By id, the modules that were called."""
        self.names: set[str] = set()
        """All names in the code that was called."""
        self.own_names: set[str] = set()
        """Those in code of no library, which may ask whether there is such an attribute."""
        self._any_name = False
        """Whether code may read or set attributes by names that it computes."""
        self._variables: set[str] = set()
        """The names of environment variables that code reads."""
        self._megatron: dict[str, Any] = {}
        """The globals of ``get_args``, if code calls it."""
        self.asks_for_gradients = False
        """Whether code asks for ``requires_grad``, as torch's reentrant checkpoint does."""
        self._codes: dict[int, CodeType] = {}
        self._globals: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self._loaded: dict[int, tuple[dict[str, Any], set[str]]] = {}
        """By id, dictionaries of globals, and the names that code loads from them."""
        self._owners: dict[int, tuple[Any, str]] = {}
        """The classes and modules of no library that code names, by id."""
        self._imports: set[str] = set()
        """Names of modules that functions may import."""
        self._copies: dict[int, tuple[Any, Any, str, bool]] = {}
        """By id: a container, its shallow copy, what it is, whether it is of an object."""
        self._values: list[tuple[Any, Any, str, Any]] = []
        """Holder, key and value of what lies elsewhere than in a module."""
        self._random: list[tuple[Callable[[], Any], Callable[[Any], Any], str, bytes]] = []
        """Of generators: what reads and sets the state, whose it is, and what it was, pickled."""
        self._profile: Any = None
        self._kinds: dict[int, type] = {}
        """The classes of users whose objects the code reaches, by id."""
        self._generators: set[int] = set()
        """The ids of generators whose state is copied, or from which a graph draws itself."""
        self._objects: dict[int, tuple[dict[str, Any], str]] = {}
        """By id, the attributes of other objects that the code reaches, and what the object is."""
        self.beyond: str | None = None
        """What leads to more objects than are looked at."""

    def begin(self) -> None:
        """A pass begins: copy what it may change, and note what it calls."""
        self._copy_all()
        self._profile = sys.getprofile()
        sys.setprofile(self._called)

    def kept(self) -> AbstractContextManager[None]:
        """Restore on exit what passes in the block change."""
        self._copy_all()
        return undone_after(self.restorer())

    def _copy_all(self) -> None:
        self._copies.clear()
        self._random.clear()
        own = (value for module in self._modules.values() for value in vars(module).values())
        self._generators = {id(one) for one in own if isinstance(one, torch.Generator)}
        self._values = [(h, k, what, h.get(k)) for h, k, what in self._elsewhere()]
        found = [(value, what) for _, _, what, value in self._values]
        found += [(random, "Python's random"), (numpy.random, "numpy.random"), *self._outside()]
        for value, what in found:
            self._copy(value, what)
        for path, module in self._modules.items():
            if not is_known(module):
                self._copies[id(vars(module))] = vars(module), dict(vars(module)), path, True
                for name in vars(module).keys() - held.INTERNAL:
                    self._copy(vars(module)[name], attribute(path, name))

    def end(self) -> None:
        sys.setprofile(self._profile)

    def put_back_draws(self) -> list[str]:
        """Restore at once, and tell, what random states the last pass changed: threads may draw."""
        drawn = list[str]()
        for read, write, what, before in self._random:
            if pickle.dumps(read()) != before:
                write(pickle.loads(before))
                drawn.append(f"the random state of {what}")
        return drawn

    def changes(self) -> Iterator[str]:
        """What the last pass has set, of all that its code can name, in words."""
        for holder, key, what, before in self._values:
            if not same_value(before, holder.get(key)):
                yield what
        for holder, before, what, has_names in self._copies.values():
            if not isinstance(holder, dict):
                if not same_value(before, holder):
                    yield what
                continue
            for key in {**before, **holder}:
                # None may be a value.
                is_same = same_value(before.get(key, self), holder.get(key, self))
                if not is_same and (not has_names or self._is_read(key, holder)):
                    yield attribute(what, key) if has_names else held.item(what, key)
            keeps_keys = before.keys() == holder.keys()  # Others are told above.
            if keeps_keys and not has_names and not same_value([*before], [*holder]):
                yield f"the order of {what}"

    def restorer(self) -> Callable[[], None]:
        """Returns a function that restores what the last pass found, but for random states."""
        copies, values = list(self._copies.values()), list(self._values)

        def restore() -> None:
            with Restores() as stack:
                for holder, key, what, before in values:
                    if holder.get(key) is not before:
                        stack.restore(what, operator.setitem, holder, key, before)
                for holder, before, what, _ in copies:
                    stack.restore(what, restore_contents, holder, before)

        return restore

    def entries(self) -> Iterator[Entry]:
        """The rows of the table: values and tensors that the code reads, at any depth."""
        seen: dict[int, Any] = {id(module): module for module in self._modules.values()}
        for holder, key, what in self._roots():
            value = holder.get(key)
            if isinstance(value, nn.Parameter | property) and getattr(value, "requires_grad", True):
                continue  # Who reads that parameter is refused.
            clause = "attribute" if isinstance(value, torch.Tensor) else "state"
            yield Entry(holder, key, clause, what)
            yield from self._inside(value, what, seen)
        for module, what in self._outside():
            yield from self._inside(module, what, seen)
        for kind in self._kinds.values():
            names = (self.names | _CALLED) - _of_capture(kind)
            what = f"attribute {kind.__name__}."
            for name in _of_capture(kind):
                yield Entry(held.Attributes(kind), name, "state", what + name)
            for name, value in vars(kind).items():
                if name in names and (callable(value) or hasattr(type(value), "__get__")):
                    yield Entry(vars(kind), name, "state", what + name)
        for owned, path, name, tensor in self._held():  # Such as a gain of a parameter.
            for key in self.own_names.intersection(vars(tensor)):
                what = f"attribute {attribute(path, name)}.{key}"
                yield Entry(held.Attributes(owned, name), key, "state", what)
                yield from self._inside(getattr(tensor, key), what, seen)

    def _outside(self) -> Iterator[tuple[nn.Module, str]]:
        """Other modules that passes call, such as one in a list, and what they are."""
        for module in [one() for key, one in self._calls.items() if key not in self._inner]:
            if not (is_known(module) or isinstance(module, torch.fx.GraphModule | None)):
                yield module, f"the called {type(module).__name__}"

    def _held(self) -> Iterator[tuple[Any, str, str, torch.Tensor]]:
        """Parameters and buffers: the dictionary, the path of its module, name and tensor."""
        for path, module in self._modules.items():
            for owned in (module._parameters, module._buffers) if not is_known(module) else ():
                yield from ((owned, path, n, t) for n, t in owned.items() if t is not None)

    def key_sets(self) -> Iterator[KeySet]:
        """What may not get anything later that code may ask for; known code asks for nothing."""
        for path, module in self._modules.items():
            if not is_known(module):
                what = attribute(path, "")
                for kind in ("module", "parameter", "buffer"):
                    yield KeySet(getattr(module, f"_{kind}s"), kind, f"{kind} {what}")
                methods = self.names.intersection(dir(type(module))) - held.INTERNAL
                reads = partial(self._asks, vars(module), methods, held.INTERNAL)
                yield KeySet(vars(module), "attribute", f"attribute {what}", reads)
        for user in self._kinds.values():
            reads = partial(self._asks, vars(user), _CALLED, _of_capture(user))
            yield KeySet(vars(user), "attribute", attribute(user.__name__, ""), reads)
        for (module, what), kind in product(self._outside(), MODULE_REGISTRIES):
            yield KeySet(getattr(module, kind), "hooks", f"a hook of {what}, number ")
        for keys, what in self._objects.values():
            reads = partial(self._asks, keys, _CALLED, set())
            yield KeySet(keys, "attribute", attribute(what, ""), reads)
        for keys, loaded in self._loaded.values():
            reads = partial(lambda of, name: name in of or "globals" in of, loaded)
            yield KeySet(keys, "attribute", f"{keys.get('__name__')}.", reads)
        for _, path, name, tensor in self._held() if not _ASK.isdisjoint(self.own_names) else ():
            named = (self.own_names | _CALLED).__contains__  # Ways of sharding set others.
            yield KeySet(vars(tensor), "attribute", attribute(attribute(path, name), ""), named)

    def _asks(self, keys: Any, also: Set[str], never: Set[str], name: str) -> bool:
        """Whether code may ask if a name is there, or it is in ``also``; imports add modules."""
        is_asked = name in also or self._is_named(name, keys)
        return is_asked and name not in never and not isinstance(keys.get(name), ModuleType)

    def _is_read(self, name: str, of: Any = None) -> bool:
        """Whether code may read what is there. Known code may too, of the layer only methods."""
        is_used = name in self.names and (of is not self._of_layer or hasattr(self._layer, name))
        return name not in held.INTERNAL and (is_used or self._is_named(name, of))

    def _is_named(self, name: str, of: Any) -> bool:
        """Whether users' code has a name, or may compute it and no known code of the layer has."""
        others = self._of_known if of is self._of_layer else held.INTERNAL
        return name in self.own_names or (self._any_name and name not in others)

    def _roots(self) -> Iterator[tuple[Any, Any, str]]:
        for path, module in self._modules.items():
            for name in [*vars(module)] if not is_known(module) else ():
                if self._is_read(name, vars(module)):
                    yield vars(module), name, f"attribute {attribute(path, name)}"
        yield from self._elsewhere()

    def _elsewhere(self) -> Iterator[tuple[Any, Any, str]]:
        """Those that are no attributes of a module: of globals, classes, functions, and so on."""
        yield from self._globals.values()
        for path, module, parts in self._of_users:
            for name in [n for n, _ in parts if n in vars(module).keys() - held.INTERNAL]:
                yield vars(module), name, f"attribute {attribute(path, name)}"
        if not _FROM_ENVIRONMENT.isdisjoint(self.own_names):  # Also in what is cached.
            self._variables.update(filter(str.isupper, self.own_names))
        for name in self._variables:
            yield os.environ, name, f"environment variable {name}"
        if (args := self._megatron.get("_GLOBAL_ARGS")) is not None:
            what = "Megatron's get_args()"
            self._objects[id(args)] = vars(args), what
            for name in self.own_names.intersection(vars(args)):
                yield held.Attributes(self._megatron, "_GLOBAL_ARGS"), name, f"{what}.{name}"
        found = [*self._owners.values()]
        found += [(holder.get(name), what) for holder, name, what in self._globals.values()]
        found += [(sys.modules.get(name), name) for name in self._imports]
        found += [(one, name) for _, _, parts in self._of_users for name, one in parts]
        for module in self._modules.values():
            if not is_known(module, LIBRARIES):
                found.append((type(module), type(module).__name__))
                found += [(value, name) for name, value in vars(module).items()]
        seen: dict[int, Any] = {}  # By id; with the values, since no other may get an id.
        for value, what in found:
            for row in self._behind(value, what, seen):
                yield row.holder, row.key, row.what

    def _behind(
        self, value: Any, what: str, seen: dict[int, Any], depth: int = held.DEPTH
    ) -> Iterator[Entry]:
        """What code reaches through functions, classes and modules, also inside of other values."""
        if not depth or id(value) in seen or is_plain(value):
            return
        seen[id(value)] = value
        if hasattr(type(value), "cache_clear"):
            self._unseen(value)
        if isinstance(value, attrgetter | methodcaller):  # What they read is in no code.
            names = {n for one in value.__reduce__()[1] for n in str(one).split(".")}
            self.names, self.own_names = self.names | names, self.own_names | names
        rows, inner = list[Entry](), list[tuple[Any, str]]()
        if isinstance(value, FunctionType):
            if id(value.__code__) in self._codes:
                rows = held.variables_of(value)
            inner = [(part, what) for part in held.parts_of(value)]
            depth += 1
        elif isinstance(value, type | ModuleType):
            if is_known(value, LIBRARIES):
                return
            named = self._is_read if depth == held.DEPTH else self.own_names.__contains__
            rows = [row for row in held.attributes_of(value, what) if named(row.key)]
            rows = [Entry(row.holder, row.key, "state", f"attribute {row.what}") for row in rows]
            inner = [*self._functions_of(value)]
        elif not isinstance(value, torch.Tensor | nn.Module):
            inner = [(part, what) for part in held.parts_of(value)]
            found, may_return = held.held_by(value, what), hasattr(type(value), "__get__")
            if isinstance(value, ContextVar) or may_return:  # Or a descriptor.
                rows = [row for row in found if row.key is None or self._is_read(row.key)]
            inner += [(row.holder.get(row.key), row.what) for row in found]
            inner += self._functions_of(type(value))
        for row in rows:
            part = row.holder.get(row.key)
            if not isinstance(part, nn.Module | ModuleType):
                yield row
            inner.append((part, row.what.removeprefix("attribute ")))
        for part, name in inner:
            yield from self._behind(part, name, seen, depth - 1)

    def _functions_of(self, kind: Any) -> Iterator[tuple[Any, str]]:
        """The functions and classes that users wrote in a class; those of autograd are called."""
        own = [k for k in getattr(kind, "__mro__", ()) if not is_known(k, LIBRARIES)]
        self._kinds.update((id(k), k) for k in own)
        if "super" in self.own_names:  # It reads what a class below has hidden.
            yield from ((one, one.__name__) for one in own)
        for name, value in [pair for owner in own for pair in vars(owner).items()]:
            if isinstance(value, type) and name not in self.own_names:
                continue
            if issubclass(kind, torch.autograd.Function):  # A device's thread runs no profile.
                for function in held.functions_in(value):
                    self._note(function.__code__, function.__globals__)
            if callable(value) or hasattr(type(value), "__get__"):
                yield value, name

    def _inside(self, value: Any, what: str, seen: dict[int, Any]) -> Iterator[Entry]:
        """The attributes of plain objects, such as a configuration, also in containers."""
        value = held.referred(value)
        if isinstance(value, Logger) and not _ASK_LEVEL.isdisjoint(self.own_names):
            yield Entry(held.Attributes(value), "level", "state", f"the level of {what}")
        named = held.is_object(value)
        opened = named or isinstance(value, (*MAPPINGS, list, tuple, deque, partial, MethodType))
        are_plain = isinstance(value, list | tuple) and all(map(is_plain, value))
        if not opened or are_plain or id(value) in seen:
            return
        if len(seen) > _MOST:
            self.beyond = what
            return
        seen[id(value)] = value
        if named and isinstance(getattr(value, "__dict__", None), dict):
            self._objects[id(value)] = vars(value), what.removeprefix("attribute ")
        if isinstance(value, nn.Module) and "training" in self.names:
            yield Entry(vars(value), "training", "training", f"training of {what}")
        of_transformers = any(k.__name__.lower() == "pretrainedconfig" for k in type(value).__mro__)
        written = _OF_CHECKPOINTS if of_transformers else ()
        for row in held.held_by(value, what):
            if named and (row.key in written or not self._is_read(row.key)):
                continue
            if named or isinstance(value, partial):
                yield row
            yield from self._inside(row.holder.get(row.key), row.what, seen)

    def _copy(self, value: Any, what: str, depth: int = held.DEPTH) -> None:
        value = held.referred(value)
        value = value.data if isinstance(value, UserDict | UserList) else value
        state = held.random_state(value)
        if state is not None and id(value) not in self._generators:
            self._generators.add(id(value))
            self._random.append((*state, what, pickle.dumps(state[0]())))
        has_names = held.is_object(value)
        if has_names and isinstance(value, dict):  # Of a user's class.
            items = {key: value.get(key) for key in value}  # Its own [...] may make something.
            self._copies.setdefault(id(value), (value, items, what, False))
        own = getattr(value, "__dict__", None) if has_names else value
        if not depth or id(own) in self._copies:
            return
        if isinstance(own, _COPIED) or is_array(own):
            before = own.copy() if isinstance(own, WeakSet) else copy.copy(own)
            self._copies[id(own)] = own, before, what, has_names
        for row in held.held_by(value, what):
            self._copy(row.holder.get(row.key), row.what, depth - 1)
        for part in held.parts_of(value):
            self._copy(part, what, depth - 1)

    def _unseen(self, value: Any, *, inlined: bool = False) -> None:
        """Count functions as called, and those that they name: cached, or ``inlined`` by Dynamo."""
        value = type(value).forward if isinstance(value, nn.Module) else value
        for function in held.functions_in(value):
            code, own = function.__code__, function.__globals__
            is_new = id(code) not in self._codes
            self._note(code, own)
            if not is_new or package_of(own.get("__name__")) in LIBRARIES:
                continue
            found = [own.get(name) for name in code.co_names]
            if inlined:
                owners = [*self._kinds.values(), *(owner for owner, _ in self._owners.values())]
                found += [vars(owner).get(name) for owner in owners for name in code.co_names]
                found += [row.holder.get(row.key) for row in held.variables_of(function)]
            for one in found:
                self._unseen(one, inlined=inlined)

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        self._note(code, frame.f_globals)
        if code is _CALL:
            module = frame.f_locals["self"]
            self._calls[id(module)] = ref(module)
        elif code is _READS_VARIABLE:
            callers = (package_of(f.f_globals.get("__name__")) for f, _ in walk_stack(frame))
            if next(one for one in callers if one not in {"os", "collections"}) not in LIBRARIES:
                self._variables.add(frame.f_locals["key"])
        elif "fn" in code.co_freevars and frame.f_globals["__name__"] == "torch._dynamo.eval_frame":
            for one in (frame.f_locals["fn"], *self._modules.values()):
                self._unseen(one, inlined=True)

    def _note(self, code: CodeType, names: dict[str, Any]) -> None:
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code
        self.names.update(code.co_names, held.texts(code.co_consts))
        module = str(names.get("__name__"))
        package = package_of(module)
        if module == "megatron.training.global_vars":
            self._megatron = names
        # torch.autograd itself asks at the start of each backward pass.
        own = package == "megatron_cg" or module == "torch.autograd"
        self.asks_for_gradients |= not own and "requires_grad" in code.co_names
        if package in LIBRARIES or (module, code.co_name) == RECORDER:  # The guard looks at it.
            return
        self.asks_for_gradients |= "needs_input_grad" in code.co_names
        self.own_names.update(code.co_names, held.texts(code.co_consts))
        instructions = list(get_instructions(code))
        is_matched = any(one.opname == "MATCH_CLASS" and one.arg for one in instructions)
        asks = not (_BY_TEXT - {code.co_name}).isdisjoint(code.co_names)  # Some hand a name on.
        self._any_name |= is_matched or asks
        self._imports.update(held.imported_by(code, str(names.get("__package__"))))
        by_text = held.texts(code.co_consts) if "globals" in code.co_names else ()
        loaded = self._loaded.setdefault(id(names), (names, set()))[1]
        loaded.update(one.argval for one in instructions if one.opname == "LOAD_GLOBAL")
        for _, path, of, tensor in self._held():
            for name in vars(tensor).keys() & code.co_names:  # Such as a counter.
                if is_plain(vars(tensor)[name]):
                    self._add(vars(tensor), name, f"attribute {attribute(path, of)}.{name}")
        for name in (*code.co_names, *by_text):
            value = names.get(name, self)
            if isinstance(value, ModuleType | type) and not is_known(value, LIBRARIES):
                self._owners[id(value)] = value, name
            is_library = isinstance(value, ModuleType) and is_known(value, LIBRARIES)
            if asks and isinstance(value, ModuleType | FunctionType) and not is_library:
                self._objects[id(value)] = vars(value), name
            if value is self or is_library or (id(names), name) in self._globals:
                continue
            self._add(names, name, f"global {name} of {names.get('__name__')}")

    def _add(self, holder: Any, name: str, what: str) -> None:
        self._globals[id(holder), name] = holder, name, what
        self._values.append((holder, name, what, holder[name]))
        self._copy(holder[name], what)


def _of_capture(kind: type) -> set[str]:
    """What TE makes a class's own while it captures, though it may be inherited (2.20.2)."""
    return {"__call__"} if issubclass(kind, nn.Module) else set()
