"""What a unit depends on: a change after the capture is used at once, and only a change."""

import argparse
import copy
import logging
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import BaseTorchFunctionMode

from megatron_cg.replay.plain import Contents, contents
from tests.unit.counted import expect
from tests.unit.replay.test_settings import to
from tests.unit.units.plain import STEPS, WARMUP, WIDTH, Training, same

CHANGED = WARMUP + 1
LOGGER = "megatron_cg.replay.mismatch_policy"
SCALES = {"now": 1.0}
"""What the units read of this module."""
HANDLES: list[Any] = []
"""Of hooks on all modules."""


@dataclass
class Settings:
    """A plain object, such as a model's configuration."""

    power: float = 1.0


@dataclass(slots=True)
class Slots:
    power: float = 1.0


class Config:
    """A class that is read itself, and whose objects have its value until they get their own."""

    power = 1.0


class Power:
    def __init__(self) -> None:
        self.inner = 1.0

    def of(self) -> float:
        return self.inner


SHARED: Any = ModuleType("shared")
"""As a module of settings that somebody imports."""
SHARED.power = 1.0
IMPORTED: Any = ModuleType("shared")
"""As one that only a function imports."""
MEGATRON: Any = ModuleType("megatron.training.global_vars")
exec("_GLOBAL_ARGS = None\ndef get_args():\n    return _GLOBAL_ARGS", vars(MEGATRON))


def elsewhere() -> tuple[Any, list[Callable[[], float]], dict[str, Callable[[], object]]]:
    """A function of autograd, functions that read numbers, and what changes these numbers."""

    class Local:
        power = 1.0

        class Inner:
            power = 1.0

        class Kept:
            level = 1.0

            def __get__(self, _of: Any, _kind: Any) -> float:
                return self.level

        kept = Kept()

    class Meta(type):
        level = 1.0

    class Made:
        @property
        def level(self) -> float:
            return type(self)._level

        _level = 1.0

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * Turned.turn * turns[0]

        turn = 1.0

    turns, factors, number, base = [1.0], {"one": 1.0}, 1.0, [1.0]
    queue, context, thread = deque([1.0]), ContextVar("context", default=1.0), threading.local()
    vars(thread)["level"] = 1.0

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, scaler = LambdaLR(optimizer, lambda _: 1.0), GradScaler("cpu")
    config, log = ConfigParser(), logging.Logger("log", logging.INFO)
    config["all"] = {"level": "1.0"}
    of_megatron = ModelParallelConfig()

    def set_number() -> None:
        nonlocal number
        number = 0.5

    def of_itself(level: float = 1.0) -> float:
        return level * of_itself.own  # type: ignore[attr-defined,no-any-return]

    def imported() -> float:
        from shared import late as read  # type: ignore[import-not-found]

        return read  # type: ignore[no-any-return]

    def by_default(kind: type[Local] = Local) -> float:
        return kind.power

    @cache
    def cached() -> float:
        return base[0]

    def set_base() -> None:
        base[0] = 0.5
        cached.cache_clear()

    vars(of_itself)["own"] = IMPORTED.late = 1.0
    read: list[Callable[[], float]]
    read = [by_default, lambda: Local.Inner.power, lambda: Meta.level, lambda: Made().level]
    read += [lambda: number, of_itself, imported, partial(lambda given: given["one"], factors)]
    read += [lambda: Local.kept, lambda: queue[0], lambda: thread.level, cached]
    MEGATRON._GLOBAL_ARGS = argparse.Namespace(level=1.0)
    read += [lambda: context.get() * 1, lambda: MEGATRON.get_args().level]
    read += [lambda: 1.0 + schedule.last_epoch, lambda: optimizer.param_groups[0]["lr"]]
    read += [lambda: config.getfloat("all", "level"), scaler.get_growth_factor]
    read += [lambda: 2.0 - log.isEnabledFor(logging.DEBUG)]
    read += [lambda: of_megatron.expert_model_parallel_size]
    changes: dict[str, Callable[[], object]] = {
        "Turned.turn": lambda: setattr(Turned, "turn", 0.5),
        "variable turns": lambda: turns.__setitem__(0, 0.5),
        "Local.power": lambda: setattr(Local, "power", 0.5),
        "Inner.power": lambda: setattr(Local.Inner, "power", 0.5),
        "Meta.level": lambda: setattr(Meta, "level", 0.5),
        "Made._level": lambda: setattr(Made, "_level", 0.5),
        "variable number": set_number,
        "of_itself.own": lambda: vars(of_itself).update(own=0.5),
        "args": lambda: factors.update(one=0.5),
        "kept.level": lambda: setattr(vars(Local)["kept"], "level", 0.5),
        "variable queue": lambda: queue.__setitem__(0, 0.5),
        "variable context": lambda: context.set(0.5),
        "variable thread": lambda: vars(thread).update(level=0.5),
        "variable base": set_base,
        "last_epoch": lambda: vars(schedule).update(last_epoch=3),
        "param_groups": lambda: optimizer.param_groups[0].update(lr=0.5),
        "variable config": lambda: config.set("all", "level", "0.5"),
        "_growth_factor": lambda: scaler.set_growth_factor(0.5),
        "model_parallel_size": lambda: setattr(of_megatron, "expert_model_parallel_size", 2),
        "the level of variable log": lambda: log.setLevel(logging.DEBUG),
        "defaults": lambda: setattr(of_itself, "__defaults__", (0.5,)),
    }
    return Turned.apply, read, changes


class Unit(nn.Module):
    common = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.late.weight.requires_grad_(False)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.1)
        self.table: torch.Tensor = nn.Buffer(torch.ones(WIDTH))
        self.settings, self.skips, self.factors = Settings(), False, [1.0, 1.0]
        self.gain = torch.ones(WIDTH)
        self.options, self.slots = argparse.Namespace(power=1.0), Slots()
        self.config, self.several = Config(), [Settings()]
        self.array, self.power = np.ones(2), Power().of
        self.turned, self.reads, self.changes = elsewhere()
        vars(self.late.weight)["settings"] = Settings()
        self.hidden = [nn.LeakyReLU(0.1), nn.Sequential(nn.LeakyReLU(0.1), nn.Dropout(0.1))]
        self.frozen = [nn.Parameter(torch.ones(WIDTH), requires_grad=False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.act(self.linear(x)) * self.gain * self.frozen[0]
        for hidden in self.hidden:
            made = hidden(made)
        made = x if self.skips else self.turned(self.late(made))
        factor = self.settings.power * self.factors[1] * self.common * SCALES["now"]
        factor *= self.options.power * self.slots.power * self.config.power
        factor *= float(os.environ.get(f"power_{len(self.factors)}", "1.0"))
        factor *= self.several[0].power * Config.power * SHARED.power
        weight: Any = self.late.weight
        factor *= float(self.array[1]) * self.power() * weight.settings.power
        for read in self.reads:
            factor *= read()
        shift = torch.full((WIDTH,), 0.1, device=x.device) * 3  # of the default dtype
        heads = made[None, None]
        made = functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]
        out: torch.Tensor = self.drop(torch.tanh(made * factor * self.table))
        return out + shift.to(x.dtype)


class Derived(Unit):
    """As ``fully_shard`` makes a class for each module."""


CHANGES: dict[str, tuple[Callable[[Any], object], int, str]] = {
    "state: attribute": (lambda unit: setattr(unit, "skips", True), 1, "attribute skips"),
    "state: object": (lambda unit: setattr(unit.settings, "power", 0.5), 1, "settings.power"),
    "state: namespace": (lambda unit: setattr(unit.options, "power", 0.5), 1, "options.power"),
    "state: of a weight": (to("late.weight.settings.power", 0.5), 1, "late.weight.settings.power"),
    "state: slot": (lambda unit: setattr(unit.slots, "power", 0.5), 1, "slots.power"),
    "state: default": (lambda unit: setattr(unit.config, "power", 0.5), 1, "config.power"),
    "state: module in a list": (
        lambda unit: setattr(unit.hidden[0], "negative_slope", 0.5),
        *(1, "hidden[0].negative_slope was 0.1"),
    ),
    "state: module in one in a list": (
        lambda unit: setattr(unit.hidden[1][0], "negative_slope", 0.5),
        *(1, "the called LeakyReLU.negative_slope was 0.1"),
    ),
    "state: array": (lambda unit: unit.array.__setitem__(1, 0.5), 1, "attribute array"),
    "state: method's object": (lambda u: setattr(u.power.__self__, "inner", 0.5), 1, "inner"),
    "state: in a list": (lambda unit: setattr(unit.several[0], "power", 0.5), 1, "[0].power"),
    "state: class alone": (lambda _: setattr(Config, "power", 0.5), 2, "config.power"),
    "state: user's module": (lambda _: setattr(SHARED, "power", 0.5), 2, "SHARED.power"),
    "state: list": (lambda unit: unit.factors.__setitem__(1, 0.5), 1, "attribute factors"),
    "state: frozen weight in a list": (
        lambda unit: unit.frozen.__setitem__(0, nn.Parameter(torch.zeros(WIDTH))),
        *(1, "attribute frozen"),
    ),
    "state: class": (lambda _: setattr(Unit, "common", 0.5), 2, "attribute Unit.common"),
    "state: derived class": (lambda unit: setattr(type(unit), "common", 0.5), 1, "Unit.common"),
    "state: environment": (
        lambda _: os.environ.update(power_2="0.5"),
        *(2, "environment variable power_2 was none"),
    ),
    "state: global": (lambda _: SCALES.update(now=0.5), 2, f"global SCALES of {__name__}"),
    **{
        f"state: {name}": (partial(lambda n, unit: unit.changes[n](), name), 1, name)
        for name in elsewhere()[2]
    },
    "state: of Megatron": (
        lambda _: vars(MEGATRON.get_args()).update(level=0.5),
        *(2, "Megatron's get_args().level was 1.0"),
    ),
    "state: shared.late": (lambda _: setattr(IMPORTED, "late", 0.5), 2, "shared.late"),
    "frozen": (
        lambda unit: unit.late.weight.requires_grad_(True),
        *(1, "requires_grad of late.weight was False at capture and is True now"),
    ),
    "training": (lambda unit: unit.drop.eval(), 1, "training of a Dropout was True"),
    "training: in a list": (
        lambda unit: unit.hidden[1][1].eval(),
        *(1, "training of the called Dropout was True"),
    ),
    "hooks: in a list": (
        lambda unit: unit.hidden[0].register_forward_hook(lambda _module, _args, out: out * 2),
        *(1, "a hook of the called LeakyReLU, number "),
    ),
    "module": (lambda unit: setattr(unit, "act", nn.Sigmoid()), 1, "module act was the Tanh"),
    "parameter": (
        lambda unit: setattr(unit.linear, "weight", nn.Parameter(torch.eye(WIDTH))),
        *(1, "parameter linear.weight was the Parameter"),
    ),
    "buffer": (lambda unit: setattr(unit, "table", torch.zeros(WIDTH)), 1, "table was the Tensor"),
    "attribute": (lambda unit: setattr(unit, "gain", torch.zeros(WIDTH)), 1, "gain was the Tensor"),
    "forward": (to("act.forward", torch.cos), 1, "own forward of act was none"),
    "forward: compiled": (
        lambda unit: unit.act.compile(backend="eager"),
        *(1, "what compiles act was none"),
    ),
    "hooks": (
        lambda unit: unit.act.register_forward_hook(lambda _module, _args, out: out * 2),
        *(1, "module act was without hooks at capture and is with tests.unit.replay"),
    ),
    "hooks: old form": (
        lambda unit: unit.register_backward_hook(lambda *_: None),
        *(1, "the layer was without register_backward_hook at capture and is with one now"),
    ),
    "hooks: all modules": (
        lambda _: HANDLES.append(register_module_forward_hook(lambda _module, _args, out: out * 2)),
        *(2, "module torch's _global_forward_hooks was without hooks"),
    ),
    "address": (
        lambda unit: setattr(unit.table, "data", unit.table.data.clone()),
        *(1, "the memory of buffer table in the forward pass was 0x"),
    ),
    "address: layout": (
        lambda unit: setattr(unit.late.weight, "data", unit.late.weight.data.t()),
        *(1, "the layout of parameter late.weight in the forward pass was (8, 1)"),
    ),
    "address: dtype": (
        lambda unit: setattr(unit.table, "data", unit.table.data.view(torch.int32)),
        *(1, "the dtype of buffer table in the forward pass was torch.float32"),
    ),
    "switches": (
        lambda _: torch._C._set_fp32_precision_setter("cuda", "conv", "ieee"),
        *(2, "was cudnn_allow_tf32=True at capture and is cudnn_allow_tf32=fp32_precision now"),
    ),
    "switches: SMs": (lambda _: torch._C._set_sm_carveout_experimental(8), 2, "sm_carveout"),
    "switches: SDPA": (
        lambda _: torch.backends.cuda.enable_flash_sdp(False),
        *(2, "the kernels of SDPA was flash_sdp_enabled=True"),
    ),
    "modes": (lambda _: BaseTorchFunctionMode().__enter__(), 2, "is BaseTorchFunctionMode now"),
    "determinism": (lambda _: torch.use_deterministic_algorithms(True), 2, ""),
    "default dtype": (lambda _: torch.set_default_dtype(torch.float64), 2, ""),
    "none: frozen later": (lambda unit: unit.linear.weight.requires_grad_(False), 0, ""),
    "none: equal number": (lambda unit: setattr(unit.settings, "power", float("1.0")), 0, ""),
    "none: equal list": (lambda unit: setattr(unit, "factors", [1.0, 1.0]), 0, ""),
    "none: equal dictionary": (lambda _: SCALES.update(now=float("1.0")), 0, ""),
    "none: read by no code": (lambda unit: setattr(unit, "read_by_nobody", 3), 0, ""),
}
"""By the clause that sees it: a change of the first unit, how many units run eagerly, and why."""


@contextmanager
def restored() -> Iterator[None]:
    """Globals and modes are as before, after the block."""
    before = sys.modules.get(MEGATRON.__name__)
    sys.modules |= {"shared": IMPORTED, MEGATRON.__name__: MEGATRON}
    try:
        yield
    finally:
        del sys.modules["shared"], sys.modules[MEGATRON.__name__]
        if before is not None:
            sys.modules[MEGATRON.__name__] = before
        SCALES["now"], Unit.common, Derived.common = 1.0, 1.0, 1.0
        del Derived.common
        os.environ.pop("power_2", None)
        Config.power = SHARED.power = 1.0
        while HANDLES:
            HANDLES.pop().remove()
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch._C._set_fp32_precision_setter("cuda", "conv", "tf32")
        torch._C._set_sm_carveout_experimental(None)
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        torch.backends.cuda.enable_flash_sdp(True)


@restored()
def train(change: Callable[[Any], object], graphed: bool) -> tuple[list[Any], Any]:
    """Losses, gradients, weights, counters; a step begins with a change of the first unit."""

    def before(run: Any) -> None:
        if run.step == CHANGED:
            change(run.model[0])

    training = Training(lambda: nn.Sequential(Derived(), Unit()), before=before)
    if not graphed:
        return list(training.run()), None
    with training.graphs() as graphs:
        return list(training.run(graphs)), graphs.counters


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_used_at_once_and_what_stays_the_same_is_replayed(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, units, words = CHANGES[name]
    eager, _ = train(change, graphed=False)
    graphed, counters = train(change, graphed=True)
    assert same(eager, graphed)
    missed = units * (STEPS - CHANGED)
    expect(counters, replayed=2 * (STEPS - WARMUP) - missed, mismatched=missed, eager=missed)
    said = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    clause = f"({name.partition(':')[0]})"
    assert len(said) == units and all(words in one and clause in one for one in said[:1])
    assert all(one.endswith(f"{clause} either.") for one in said[1:])


OBJECT = object()
LEAVES = (0, 0.0, -0.0, 1, True, None, "a", float("nan"), 1.5, OBJECT)


def drawn(chance: random.Random, depth: int) -> Any:
    kind = chance.choice(("leaf", "leaf", "list", "tuple", "set", "dict")) if depth else "leaf"
    several = range(chance.randint(0, 3))
    if kind == "leaf":
        return chance.choice(LEAVES)
    if kind == "set":
        return {chance.choice((0, 1, 2, OBJECT)) for _ in several}
    if kind == "dict":
        return {chance.choice("abc"): drawn(chance, depth - 1) for _ in several}
    made = [drawn(chance, depth - 1) for _ in several]
    return made if kind == "list" else tuple(made)


def change(value: Any, chance: random.Random) -> Any:
    """Change the value in place, or one inside, or copy it, or put the same in again."""
    inner = [*value.values()] if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple) and inner and chance.random() < 0.5:
        change(chance.choice(inner), chance)
    elif isinstance(value, list):
        value[:] = chance.choice((value[:-1], [*value, chance.choice(LEAVES)], value[::-1]))
    elif isinstance(value, dict):
        value[chance.choice("abc")] = chance.choice(LEAVES)
    elif isinstance(value, set):
        value.add(chance.choice((0, 1, 2, 3, True)))
    return copy.copy(value) if chance.random() < 0.2 else value


def test_contents_are_found_the_same_as_by_value() -> None:
    found = []
    for seed in range(3000):
        chance = random.Random(seed)
        value = drawn(chance, 4)
        known, before = Contents(value), contents(value)
        for _ in range(3):
            value = change(value, chance)
            found.append(known.are_in(value))
            assert found[-1] == (contents(value) == before), (seed, value)
    assert 1000 < sum(found) < len(found) - 1000


def test_only_a_container_in_which_nothing_can_be_replaced_need_not_be_looked_at() -> None:
    assert not Contents((1, ("a", frozenset({2})))).can_change
    assert Contents((1, ("a", [2]))).can_change
