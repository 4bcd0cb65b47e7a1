"""What is compared once, as a forward pass begins: switches of torch, and settings of modules.

Code of Megatron and TE reads numbers, names and functions of its modules, of their classes and of
the model's config, and a replay runs no code. Rows of the guard would take longer than the replay.
So all are compared once a forward pass, for all units together: 90 us for 8 layers, 280 us for 48.
Schedules set them in a pass, and microbatches may differ. Other packages' code is observed instead.

Note [Switches of torch]
    Operations read them when they choose kernels; a graph holds those of capture. Most are compared
    as a pass begins, since reading takes a microsecond each. Those of SDPA are set inside passes
    too (``sdpa_kernel``): units that call it have a row for them.

Note [What counts]
    Of a module its config, floats, strings, enums, tuples of plain values and functions, None, 0 or
    1 that becomes such a value, and new attributes that take the place of a method. Other integers
    and booleans are left out: modules count passes with them. What is None in a module of TE is
    left out too. Of a config everything plain that layers may read, and of a class its functions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from inspect import unwrap
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron_cg.replay.guard import Entry, KeySet, Objects
from megatron_cg.replay.plain import is_container, is_known, is_plain
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.patch import COPIES

SDPA = [f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "math", "cudnn", "fa3")]
_OTHERS = [
    *(f"cublas_allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"cudnn_{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *("cublas_allow_tf32", "cublas_allow_fp16_accumulation", "float32_matmul_precision"),
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled"),
    *("blas_preferred_backend", "linalg_preferred_backend", "sm_carveout_experimental"),
    *(f"fp32_precision_getter cuda {operation}" for operation in ("matmul", "conv", "rnn")),
    *(f"fp32_precision_getter mkldnn {operation}" for operation in ("matmul", "conv")),
]
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, staticmethod, classmethod)
_OF_MODULES = (type(None), float, str, Enum, *_FUNCTIONS)
_OF_LOOPS = ("moe_router_bias_update_rate", "mtp_loss_scaling_factor")
"""Fields of a config that are scheduled in training and read behind the layers."""
OF_FSDP = ("_training_state", "_phase", "_name")
"""What Megatron-FSDP writes into modules, in its versions 1 and 2; version 1 annotates nothing."""
_OTHER_ROWS = ("forward", "_is_full_backward_hook", *OF_FSDP, *COPIES)
_names_of = cache(lambda kind: frozenset(dir(kind)).difference(COPIES))
_DISPATCHER = "token_dispatcher"  # It is no module, and scopes capture its methods.
_TE = "transformer_engine."
_CLAUSE, _CLASSES = "setting", SimpleNamespace(get=type)
"""The class of an object, as a key, is a row like others."""


class Switches:
    """Those of these names that this torch has, as a key; see Note [Switches of torch]."""

    def __init__(self, names: Sequence[str] = _OTHERS) -> None:
        found = ((one, getattr(torch._C, f"_get_{one.split()[0]}", None)) for one in names)
        self._read = {
            n: partial(_precision, read, *n.split()[1:]) if "32" in n else read
            for n, read in found
            if read
        }
        self._seen: dict[str, str] = {}

    def get(self, _key: str = "") -> str:
        """Their values in words: one object for each choice, as a row wants it."""
        values = [read() for read in self._read.values()]
        now = str(values)
        if now not in self._seen:
            self._seen[now] = "; ".join(map("{}={}".format, self._read, values))
        return self._seen[now]


def _precision(read: Callable[..., Any], *operation: str) -> Any:
    """Its value. torch tells none by its old name that ``fp32_precision`` has set."""
    try:
        return read(*operation)
    except RuntimeError:
        return "fp32_precision"


def settings_of(units: Iterable[Unit]) -> Objects:
    """Switches of torch, and settings of the modules in the graphs of ``units``, as they are."""
    entries = [Entry(Switches(), "", "switches", "a switch of torch")]
    key_sets, seen = list[KeySet](), set[int]()
    for unit in units:
        names = {module: name for name, module in unit.layer.named_modules()}
        for module in (unit.layer, *unit.graphed):
            is_users = not is_known(module, unit.known_packages)
            has_settings = not is_users or (module is unit.layer and not unit.is_plain_module)
            if not has_settings or id(module) in seen:
                continue
            seen.add(id(module))
            where, own = f"{unit.name}, {names.get(module) or 'the layer itself'}", vars(module)
            for key in _counted(module, is_users=is_users):
                entries.append(Entry(own, key, _CLAUSE, f"{key} of {where}", _counts))
            entries.append(Entry(_CLASSES, module, _CLAUSE, f"the class of {where}"))
            kind: Any = type(module)
            key_sets.append(KeySet(own, _CLAUSE, f"{where}: ", _names_of(kind).__contains__))
            if (part := own.get(_DISPATCHER)) is not None:
                reads = partial(hasattr, type(part))
                key_sets.append(KeySet(vars(part), _CLAUSE, f"dispatcher of {where}: ", reads))
            entries += _of_class_and_config(module, seen)
    return Objects(entries, key_sets)


def _counted(module: nn.Module, *, is_users: bool) -> Iterator[str]:
    """The attributes of a module that are settings; see Note [What counts].

    Of a user's layer those that Megatron's code sets: the rest is for the user's code to read.
    """
    kinds = type(module).__mro__
    makers = [vars(kind).get("__init__") for kind in kinds if is_users and is_known(kind)]
    set_by_megatron = {n for one in filter(None, makers) for n in unwrap(one).__code__.co_names}
    is_of_te = any(kind.__module__.startswith(_TE) for kind in kinds)
    for key, value in vars(module).items():
        counts = _is_setting(value) and not (is_of_te and value is None)
        counts |= key == "config" or (type(value) is int and value in (0, 1))
        counts &= not is_users or key in set_by_megatron
        if counts and key not in _OTHER_ROWS:
            yield key


def _of_class_and_config(module: nn.Module, seen: set[int]) -> Iterator[Entry]:
    """Of the classes of a module and of its config, unless they are in ``seen``."""
    kinds = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    for kind in (*kinds, *type(vars(module).get(_DISPATCHER)).__mro__[:-1]):
        if id(kind) not in seen:
            seen.add(id(kind))
            for key, value in vars(kind).items():
                if isinstance(value, _FUNCTIONS) and key not in COPIES:
                    yield Entry(vars(kind), key, _CLAUSE, f"{key} of class {kind.__name__}")
    config = getattr(module, "config", None)
    config = getattr(config, "__dict__", {}).get("_config", config)
    if is_dataclass(config) and id(config) not in seen:
        seen.add(id(config))
        for key, value in vars(config).items():
            counts = is_plain(value) or is_container(value) or key == "activation_func"
            if counts and key not in _OF_LOOPS:
                what = f"{key} of the model's {type(config).__name__}"
                yield Entry(vars(config), key, _CLAUSE, what, _is_no_function)


def _is_setting(value: Any) -> bool:
    """Whether the attribute of a module counts."""
    return isinstance(value, _OF_MODULES) or (type(value) is tuple and all(map(is_plain, value)))


def _counts(value: Any) -> bool:
    """Whether it counts in place of None, 0 or 1: code of the layer may compute with a tensor."""
    return _is_setting(value) or isinstance(value, torch.Tensor)


def _is_no_function(value: Any) -> bool:
    """Of a config: functions that a loop gave it, as for gradients and timers, do not count."""
    return not callable(value)
