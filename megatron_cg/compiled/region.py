"""What is compiled, and the fingerprint of what it was compiled for.

A fingerprint is a flat mapping of names to texts: versions, the device, the mode, each field of the
region's configuration, shapes and dtypes of all tensors, sizes of all groups. Rank numbers,
addresses and names of groups are not in it, so it is the same on all ranks. Plain values that the
code read are compared by :class:`PlainState`; what neither names, the comparison with eager finds.

Note [Plain state]
    Dynamo makes a constant of a number that it reads, and a guard that compares it. Saved code has
    no guards. What is kept of each is its question, an expression that Dynamo gives, and the answer
    as text. Dynamo (torch 2.11 to 2.15) has no guard for attributes that are read through a class,
    for defaults of positional arguments, and for variables of the environment that are not set:
    those whose names are in the traced source are added. Globals of libraries are trusted.
"""

import ast
import dataclasses
import importlib
import inspect
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_cg.errors import PrecompileError
from megatron_cg.replay.plain import LIBRARIES, is_container, is_known, is_plain
from megatron_cg.upstream.symbols import Symbol, installed_version
from megatron_cg.version import __version__

PREFIX = "mcg::"
"""Begins the name of a role in saved code: ``mcg::tp``."""

Capability = tuple[int, int] | None
"""The compute capability of the GPUs; None for the CPU."""

_GROUPS = {
    role: Symbol(f"megatron.core.parallel_state:get_{name}_group", f"the group {role}")
    for role, name in (("tp", "tensor_model_parallel"), ("cp", "context_parallel"))
}

_PACKAGES = ("megatron-core", "megatron-fsdp")
"""Not transformer-engine: its modules cannot be traced, and the machine that compiles may lack
it."""


RELIES_ON = (
    *_GROUPS.values(),
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
        if "requires_grad" in words:
            found.add("all(one.requires_grad for one in self.parameters())")
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

    def __init__(self, questions: Iterable[str]) -> None:
        self._questions = tuple(questions)
        found = {name for text in self._questions for name in _ROOT.findall(text)}
        modules = {name: importlib.import_module(name) for name in found}
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
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, FunctionType):
        code = value.__code__
        body = code.co_code, code.co_names, [*filter(is_plain, code.co_consts)]
        name += f" with code {sha256(repr(body).encode()).hexdigest()[:8]}"
    return name


@dataclass(frozen=True)
class Region:
    """A module to be compiled, or to run compiled code.

    For ``save``, weights and tensors are on the meta device and ``groups`` are fake. For ``load``,
    they are those of the rank.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    """Positional arguments of one call. Shapes, strides and dtypes are fixed by them."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """The process groups of the module's collectives by role, such as ``tp``."""
    config: Any = None
    """What the module was built from: a dataclass, such as Megatron's TransformerConfig, or a
    mapping. All its fields are part of the fingerprint."""

    def device(self) -> torch.device:
        """The device of all parameters, buffers and arguments.

        Raises PrecompileError if there are several, or no tensor at all.
        """
        devices = {tensor.device for _name, tensor in self.tensors()}
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices))) or "no tensors"
            raise PrecompileError(
                f"{type(self.module).__name__} has its tensors on {names}: move the module and its "
                "arguments to one device"
            )
        return devices.pop()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield f"parameter.{name}", parameter
        for name, buffer in self.module.named_buffers():
            yield f"buffer.{name}", buffer
        for name, value in self.arguments():
            if isinstance(value, torch.Tensor):
                yield name, value

    def arguments(self) -> list[tuple[str, Any]]:
        """All leaves of the arguments, with names that say where they stand."""
        return [
            (f"argument.{name}.{index}" if index else f"argument.{name}", leaf)
            for name, value in (*enumerate(self.args), *sorted(self.kwargs.items()))
            for index, leaf in enumerate(tree_leaves(value, is_leaf=lambda leaf: leaf is None))
        ]


def megatron_groups() -> dict[str, dist.ProcessGroup]:
    """Megatron's groups that a layer's collectives use on this rank, for ``Region.groups``.

    Data-parallel groups are not among them, so an artifact serves runs of any data-parallel size.
    Megatron's ``initialize_model_parallel`` must have been called.
    """
    return {role: symbol.find()() for role, symbol in _GROUPS.items()}


def fingerprint(region: Region, capability: Capability) -> dict[str, str]:
    """The fingerprint of a region in this process, for GPUs of ``capability``, or None for CPUs."""
    device, kind = "cpu" if capability is None else "cuda", type(region.module)
    entries = {
        "version.python": ".".join(platform.python_version_tuple()[:2]),
        "version.megatron_cg": __version__,
        "version.torch": torch.__version__,  # With the suffix of its build, as torch compares it.
        "device": device if capability is None else "cuda {}.{}".format(*capability),
        "module": f"{kind.__module__}.{kind.__qualname__}",
        "module.training": str(region.module.training),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
    }
    entries |= {f"version.{name}": installed_version(name) or "none" for name in _PACKAGES}
    entries |= {f"group.{role}": str(group.size()) for role, group in region.groups.items()}
    fields = vars(region.config) if dataclasses.is_dataclass(region.config) else region.config
    entries |= {f"config.{name}": _repr(value) for name, value in dict(fields or {}).items()}
    entries |= module_kinds(region.module) | call_kinds(region, device)
    return dict(sorted(entries.items()))


def module_kinds(module: torch.nn.Module) -> dict[str, str]:
    """What modules must have in common to run the same code."""
    return {name: _tensor_kind(value) for name, value in Region(module, ()).tensors()}


def call_kinds(region: Region, device_type: str) -> dict[str, str]:
    """What a call must have in common with the traced one."""
    enabled = torch.is_autocast_enabled(device_type)
    kinds = {"autocast": str(torch.get_autocast_dtype(device_type)) if enabled else "off"}
    for name, value in region.arguments():
        kinds[name] = _tensor_kind(value) if isinstance(value, torch.Tensor) else _repr(value)
    return kinds


def differences(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    lines = [
        f"{name} was {saved.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    more = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
    return "; ".join(lines[:5] + more)


def _tensor_kind(tensor: torch.Tensor) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}{grad}"


def _repr(value: Any) -> str:
    """Without addresses and the order of sets, which differ between processes."""
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
