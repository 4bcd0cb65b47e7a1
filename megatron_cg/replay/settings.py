"""What is compared once, as a step begins: switches of torch, and settings of modules.

Code of Megatron and TE reads numbers, names and functions of its modules, of their classes and of
the model's config, and a replay runs no code. Rows of the guard would take longer than the replay.
So all are compared once a step, for all units together. Code of other packages is observed instead,
and has rows.

Note [Switches of torch]
    Operations read them when they choose kernels; a graph holds those of capture. Most are compared
    as a step begins, since reading takes a microsecond each. Those of SDPA are set around passes
    too (``sdpa_kernel``): units that call it have a row for them.

Note [What counts]
    Of a module its numbers of type float, strings and functions, and new attributes that take the
    place of a method. Integers and booleans are left out, since modules count passes with them. Of
    a config everything plain that layers may read, and of a class its functions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from operator import call, is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.guard import CAUSES, Mismatch, described
from megatron_cg.replay.plain import KNOWN, Contents, is_container, is_known, is_plain, same_value
from megatron_cg.replay.unit import Unit

SDPA = [f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn", "fa3")]
_OTHERS = [
    *(f"cublas_allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *("cublas_allow_tf32", "cublas_allow_fp16_accumulation", "float32_matmul_precision"),
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled"),
    *("blas_preferred_backend", "linalg_preferred_backend"),
    *(f"fp32_precision_getter cuda {operation}" for operation in ("matmul", "conv", "rnn")),
    *(f"fp32_precision_getter mkldnn {operation}" for operation in ("matmul", "conv")),
]
_PACKAGES = KNOWN | {"torch"}
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, staticmethod, classmethod)
_OF_MODULES = (float, str, *_FUNCTIONS)
_OF_LOOPS = ("moe_router_bias_update_rate", "mtp_loss_scaling_factor")
"""Fields of a config that are scheduled in training and read behind the layers."""
_CAUSE = (
    "Code of the layer reads it, and a replay runs no code. Set it before the capture, or delete "
    "the graphs and capture again."
)


class Switches:
    """Those of these names that this torch has, as a row; see Note [Switches of torch]."""

    def __init__(self, names: Sequence[str] = _OTHERS) -> None:
        found = ((one, getattr(torch._C, f"_get_{one.split()[0]}", None)) for one in names)
        self._read = {
            n: partial(_told, read, *n.split()[1:]) if "32" in n else read
            for n, read in found
            if read
        }
        self._seen: dict[str, str] = {}
        self._first: str | None = None

    def get(self, _key: str = "") -> str:
        """Their values in words: one object for each choice, as a row wants it."""
        now = str([read() for read in self._read.values()])
        text = self._seen.get(now)
        if text is None:
            values = (read() for read in self._read.values())
            text = self._seen[now] = "; ".join(map("{}={}".format, self._read, values))
        return text

    def broken(self) -> Mismatch | None:
        now = self.get()
        self._first = self._first or now
        if now == self._first:
            return None
        before, after = self._first.split("; "), now.split("; ")
        changed = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
        return Mismatch("switches", "a switch of torch", *changed, CAUSES["switches"])


def _told(read: Callable[..., Any], *operation: str) -> Any:
    """Its value. torch tells none by its old name that ``fp32_precision`` has set."""
    try:
        return read(*operation)
    except RuntimeError:
        return "fp32_precision"


class Settings:
    """Those of the modules in the graphs of ``units``, as they are now."""

    def __init__(self, units: Iterable[Unit]) -> None:
        rows: list[tuple[Mapping[str, Any], str, str]] = []
        self._owners: list[tuple[nn.Module, frozenset[str], str]] = []
        seen: set[int] = set()
        for unit in (one for one in units if not one.is_plain_module):
            names = {module: name for name, module in unit.layer.named_modules()}
            for module in (unit.layer, *unit.graphed):
                if is_known(module, _PACKAGES) and id(module) not in seen:
                    seen.add(id(module))
                    where = f"{unit.name}, {names.get(module) or 'the layer itself'}"
                    self._owners.append((module, frozenset(vars(module)), where))
                    rows += _rows(vars(module), where, _OF_MODULES, own=module is unit.layer)
                    rows += _shared_rows(module, seen)
        self._rows = rows
        self._reads, self._keys = [holder.get for holder, _, _ in rows], [key for _, key, _ in rows]
        self._values = list(map(call, self._reads, self._keys))
        containers = {n: v for n, v in enumerate(self._values) if is_container(v)}
        self._contents = {n: Contents(value) for n, value in containers.items()}
        self._texts = {n: described(value) for n, value in containers.items()}
        self._shapes = [(type(module), len(keys)) for module, keys, _ in self._owners]

    def broken(self) -> Mismatch | None:
        """The first that has changed."""
        if not all(map(is_, map(call, self._reads, self._keys), self._values)):
            for number, (read, key) in enumerate(zip(self._reads, self._keys, strict=True)):
                was, now = self._values[number], read(key)
                if now is not was and not self._is_same(number, now):
                    return self._changed(self._rows[number][2], described(was), now)
                self._values[number] = now
        for number, contents in self._contents.items():
            if not contents.are_in(self._values[number]):
                now = self._values[number]
                return self._changed(self._rows[number][2], self._texts[number], now)
        shapes = [(type(module), len(vars(module))) for module, _, _ in self._owners]
        if shapes != self._shapes:
            for (module, known, where), (kind, _) in zip(self._owners, self._shapes, strict=True):
                if type(module) is not kind:
                    return self._changed(f"the class of {where}", described(kind), type(module))
                new = vars(module).keys() - known
                for key in sorted(key for key in new if hasattr(kind, key)):
                    was, now = described(getattr(kind, key)), vars(module)[key]
                    return self._changed(f"{key} of {where}", was, now)
        return None

    def _is_same(self, number: int, now: Any) -> bool:
        was, contents = self._values[number], self._contents.get(number)
        if was is None and callable(now):
            return True  # A loop gives a config its functions, for gradients and timers.
        return same_value(was, now) if contents is None else contents.are_in(now)

    def _changed(self, what: str, was: str, now: Any) -> Mismatch:
        return Mismatch("setting", what, was, described(now), _CAUSE)


def _rows(
    holder: Mapping[str, Any], where: str, kinds: tuple[type, ...], *, own: bool = False
) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Of a layer itself without its forward, which the replay replaces."""
    for key, value in holder.items():
        if isinstance(value, kinds) and not (own and key == "forward"):
            yield holder, key, f"{key} of {where}"


def _shared_rows(module: nn.Module, seen: set[int]) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Of the classes of a module and of its config, unless they are in ``seen``."""
    for kind in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        if id(kind) not in seen:
            seen.add(id(kind))
            yield from _rows(vars(kind), f"class {kind.__name__}", _FUNCTIONS)
    config = getattr(module, "config", None)
    config = getattr(config, "__dict__", {}).get("_config", config)
    if is_dataclass(config) and id(config) not in seen:
        seen.add(id(config))
        for key, value in vars(config).items():
            counts = is_plain(value) or is_container(value) or key == "activation_func"
            if counts and key not in _OF_LOOPS:
                yield vars(config), key, f"{key} of the model's {type(config).__name__}"
