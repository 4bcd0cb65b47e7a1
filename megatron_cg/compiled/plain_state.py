"""Plain Python values that code holds as constants: what they were when it was traced, and are now.

Dynamo makes a constant of a number that it reads, and a guard that compares it. Saved code has no
guards. What is kept of each is its question, an expression that Dynamo gives, and the answer as
text. Dynamo (torch 2.11 to 2.15) has no guard for attributes that are read through a class, for
defaults of positional arguments, and for variables of the environment that are not set: those whose
names are in the traced source are added. Globals of libraries are trusted.
"""

import ast
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from operator import is_
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from megatron_cg.capture.python_state import LIBRARIES, is_known
from megatron_cg.replay.plain import is_container, is_plain
from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol("torch._dynamo.types:GuardFilterEntry", "a guard", ("value", "guard_type")),
    Symbol("torch._dynamo.package:InlinedSource", "traced code", ("firstlineno", "lastlineno")),
    Symbol("torch._dynamo.convert_frame:GraphRuntimeEnv", "modules", ("import_sources",)),
)

_IMPORTED = re.compile(r"G\['(__import_\w+)'\]")
_OF_CLASS = re.compile(r"^dict\((type\(.*\))(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]")
ABSENT = "absent"
"""The answer where the question cannot be asked: an object that it goes through is not there."""
_ROOT = re.compile(r"(?<![\w.])modules\['([^']+)")
_ELSEWHERE = re.compile(r"\b[GL]\[|^dict\(|\benviron\b")
"""Of arguments, of globals of torch's own call of a module, of all names in a class."""
_SCRIPT = "__main__"
_ENVIRONMENT = "modules['os'].environ._data"


class Guards:
    """A guard filter for ``torch.compile`` that keeps no guard, and notes what all of them ask."""

    def __init__(self) -> None:
        self._entries: list[Any] = []

    def __call__(self, entries: Sequence[Any]) -> list[bool]:
        self._entries += entries
        return [False for _ in entries]

    def questions(self, function: Any) -> list[str]:
        """Expressions over ``self``, the traced module, and ``modules``, by name."""
        lines: list[str] = []
        for source in function.source_info().inlined_sources:
            if source.module.partition(".")[0] not in LIBRARIES:
                text = inspect.getsource(sys.modules[source.module]).splitlines()
                lines += text[source.firstlineno - 1 : source.lastlineno - 1]
        words = {*re.findall(r"\w+", "\n".join(lines))}
        imports = function._artifacts.runtime_env.import_sources
        found: set[str] = set()
        for entry in self._entries:
            name = _IMPORTED.sub(lambda m: f"modules[{imports[m[1]]!r}]", entry.orig_guard.name)
            name = _OF_CLASS.sub(r"\1.\2", name).replace("L['self']", "self")
            roots = [one.partition(".")[0] for one in _ROOT.findall(name)]
            if entry.value is os.environ:
                keys = re.findall(r"""["'](\w+)["']""", "\n".join(lines))
                found |= {f"{_ENVIRONMENT}.get({key.encode()!r})" for key in keys}
            elif name and LIBRARIES.isdisjoint(roots) and not _ELSEWHERE.search(name):
                found.update(_asked(name, entry, words))
        return sorted(found)


def _asked(name: str, entry: Any, words: set[str]) -> Iterator[str]:
    kind, value = entry.guard_type, entry.value
    given = getattr(entry.orig_guard.create_fn, "keywords", {})
    if kind == "HASATTR":
        base, _, attribute = name.rpartition(".")
        yield f"hasattr({base}, {attribute!r})"
    elif kind in ("DICT_CONTAINS", "SET_CONTAINS") and _is_literal(given["key"]):
        yield f"{given['key']!r} in {name}"
    elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
        if (name, given["attr"]) != ("self", "forward"):  # That is what attach sets.
            yield f"{given['attr']!r} in {name}.__dict__"
    elif kind == "SEQUENCE_LENGTH":
        yield f"len({name})"
    elif kind == "DICT_KEYS_MATCH" and _is_literal(tuple(value)):
        yield f"(*{name},) == {tuple(value)!r}"
    elif kind != "EMPTY_NN_MODULE_HOOKS_DICT" and (kind != "TYPE_MATCH" or not is_container(value)):
        yield from _of_value(name, value, words)


def _of_value(name: str, value: Any, words: set[str]) -> Iterator[str]:
    if is_plain(value):
        if not isinstance(value, torch.device):  # It is meta while tracing.
            yield name
    elif isinstance(value, tuple):
        yield name
    elif _is_literal(value):  # It can change in place.
        yield f"{name} == {value!r}"
    elif isinstance(value, FunctionType | MethodType):
        name += ".__func__" * isinstance(value, MethodType)  # Each access makes another method.
        if str(value.__module__).partition(".")[0] not in LIBRARIES:
            yield from (name, f"{name}.__defaults__")
    elif not isinstance(value, torch.Tensor | ModuleType) and not is_container(value):
        kind = value if isinstance(value, type) else type(value)
        name = name if kind is value else f"type({name})"
        own = [one for one in kind.__mro__ if not is_known(one, LIBRARIES)]
        # fully_shard gives modules another class.
        if own and not issubclass(kind, nn.Module):
            yield name
        for key in {key for one in own for key in vars(one) if key in words} - {"__init__"}:
            held = getattr(kind, key, None)
            if isinstance(held, FunctionType | MethodType) or is_plain(held) or is_container(held):
                yield from _of_value(f"{name}.{key}", held, words)


def _is_literal(value: Any) -> bool:
    with suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(repr(value)) == value)
    return False


class PlainState:
    """The answers to questions of :class:`Guards` in this process."""

    def __init__(self, questions: Iterable[str], module: nn.Module) -> None:
        self._questions = tuple(questions)
        found = {name for text in self._questions for name in _ROOT.findall(text)}
        modules = {name: importlib.import_module(name) for name in found - {import_name(_SCRIPT)}}
        is_script = any(type(inner).__module__ == _SCRIPT for inner in module.modules())
        for name in found - modules.keys():
            modules[name] = sys.modules[_SCRIPT] if is_script else importlib.import_module(name)
        scope = {"nan": math.nan, "inf": math.inf, "modules": modules}
        self._all = eval(f"lambda self: ({''.join(f'{one}, ' for one in self._questions)})", scope)
        self._each = [eval(f"lambda self: {one}", scope) for one in self._questions]
        self._last: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()

    def texts(self, module: nn.Module) -> dict[str, str]:
        """The answers for a module, in words that are the same in each process."""
        pairs = zip(self._questions, self._each, strict=True)
        return {name: _answer(ask, module) for name, ask in pairs}

    def is_as(self, saved: Mapping[str, str], module: nn.Module) -> bool:
        """Whether the answers are those of ``saved``. Objects that were seen are not compared."""
        try:
            values = self._all(module)
        except Exception:
            return self.texts(module) == saved
        last = self._last.get(module)
        if last is None or not all(map(is_, values, last)):
            if self.texts(module) != saved:
                return False
            self._last[module] = values
        return True


def _answer(ask: Any, module: nn.Module) -> str:
    try:
        return _text(ask(module))
    except Exception:
        return ABSENT


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if is_plain(value):
        return repr(value)
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{import_name(kind.__module__)}.{kind.__qualname__}"
    if isinstance(value, FunctionType):
        code = value.__code__
        body = code.co_code, code.co_names, [*filter(is_plain, code.co_consts)]
        name += f" with code {sha256(repr(body).encode()).hexdigest()[:8]}"
    return name


def import_name(module: str) -> str:
    """The name by which a file imports what is ``__main__`` where the file itself is run."""
    main = getattr(sys.modules[_SCRIPT], "__file__", None)
    return Path(main).stem if module == _SCRIPT and main else module


@contextmanager
def script_importable() -> Iterator[None]:
    """In the block, importing the script that runs by its file's name does not run it once more."""
    name = import_name(_SCRIPT)
    if name in sys.modules:
        yield
        return
    sys.modules[name] = sys.modules[_SCRIPT]
    try:
        yield
    finally:
        del sys.modules[name]
