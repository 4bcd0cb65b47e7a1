"""Random programs: a model of units, and what happens while it is trained."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.unit.random_units.calls import FEATURES, HARD
from tests.unit.random_units.events import AFTER, BETWEEN, EVENTS
from tests.unit.random_units.features import COMPUTE, STATE, Feature, W

STEPS, ROWS = 7, 5
"""Steps of a program, and rows of a batch."""
SHARED = ("", "", "", "units", "head")
FROZEN = ("", "", "", "embed", "units.0.", ".bias", "units.0.a.weight", "head")
EASY = [name for name in FEATURES if name not in HARD]
HAPPENS = EVENTS | {name: event for events in AFTER.values() for name, event in events.items()}
"""All events by name."""


@dataclass(frozen=True)
class Program:
    """What a seed stands for. The defaults are the simplest."""

    seed: int
    units: tuple[tuple[str, ...], ...] = (("plain",),)
    events: tuple[tuple[int, str, int], ...] = ()
    """Step, name, and the unit that is changed."""
    order: tuple[int, ...] = (0,)
    between: str = "nothing"
    shared: str = ""
    """Whose weights are one: those of two units, or of a unit and the head."""
    frozen: str = ""
    style: str = "positions"
    autocast: str = ""
    """Around the forward pass, or around the whole step."""
    sharding: str = ""
    optimizer: str = "SGD"
    residual: bool = True
    """Whether units add their input to what they compute."""
    micro: int = 1
    """Microbatches of a step."""
    embed: bool = True
    input_grad: bool = False
    around: bool = False
    """Whether activation checkpointing is around the first unit."""
    warmup: int = 2
    verify_interval: int = 0
    verify_steps: int = 0
    separate: bool = False
    """Whether units take their arguments through views, eagerly too."""
    recapture: int = 0

    def __str__(self) -> str:
        default = Program(self.seed)
        given = ((one.name, getattr(self, one.name)) for one in fields(self))
        return ", ".join(
            f"{name}={value!r}" for name, value in given if value != getattr(default, name)
        )


def draw(seed: int, attempt: int = 0) -> Program:
    """The program of a seed; eager training may reject it, and the next attempt follows."""
    chance = random.Random(f"{seed}/{attempt}")
    count = chance.choice((1, 1, 2, 2, 3))
    units = [chance.sample(EASY, chance.randint(1, 4)) for _ in range(count)]
    if chance.random() < 0.3:
        hard = chance.choice(units)
        hard[chance.randrange(len(hard))] = chance.choice(HARD)
    names, steps = [*EVENTS], range(STEPS)
    events = [
        (chance.choice(steps), chance.choice(names), chance.randrange(count))
        for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))
    ]
    for number, features in enumerate(units):
        for name in (one for one in features if one in AFTER):
            if chance.random() < (0.8 if name in HARD else 0.4):
                events.append((chance.choice(steps[2:]), chance.choice([*AFTER[name]]), number))
    order = [*range(count)]
    if chance.random() < 0.1:
        order.insert(chance.randrange(count + 1), chance.randrange(count))
    rare = chance.random()
    # FSDP2 frees a weight after its unit, and reading it there ends the process, eagerly too.
    is_kept = any("weight returned" in names for names in units)
    return Program(
        seed,
        tuple(map(tuple, units)),
        tuple(sorted(events)),
        tuple(order),
        chance.choice(["nothing"] * 24 + [*BETWEEN]),
        chance.choice(SHARED) if chance.random() < 0.2 else "",
        chance.choice(FROZEN) if chance.random() < 0.5 else "",
        chance.choice(("positions", "names", "all names") * 25 + ("forward",)),
        chance.choice(("", "", "", "forward", "step")),
        "fsdp" if rare < 0.06 and not is_kept else "ddp" if rare < 0.12 else "",
        chance.choice(("SGD", "AdamW")),
        chance.random() < 0.6,
        chance.choice((1, 1, 1, 1, 1, 2)),
        chance.random() < 0.85,
        chance.random() < 0.15,
        chance.random() < 0.02,
        chance.choice((2, 2, 3)),
        chance.choice((0, 0, 0, 1, 2)),
        chance.choice((0, 0, 0, 1, 2)),
        chance.random() < 0.2,
        chance.choice((0, 0, 1, 2)),
    )


def alone() -> Iterator[Program]:
    """Each thing by itself: what a program of one unit can have."""
    yield from (Program(1, ((name,),)) for name in FEATURES)
    yield from (Program(1, ((name,),), autocast="forward") for name in COMPUTE | STATE)
    for name, events in AFTER.items():
        yield from (Program(1, ((name,),), ((5, event, 0),)) for event in events)
    for step in (1, 5):
        yield from (Program(1, events=((step, name, 0),)) for name in EVENTS)
    yield from (Program(1, between=name, residual=False) for name in BETWEEN)
    yield from (Program(1, frozen=name) for name in dict.fromkeys(FROZEN))
    for autocast in ("", "forward", "step"):
        yield Program(1, autocast=autocast)
        yield Program(1, autocast=autocast, order=(0, 0))
        yield Program(1, autocast=autocast, shared="head")
        yield Program(1, (("plain",), ("plain",)), order=(0, 1), autocast=autocast, shared="units")
    for option in ("fsdp", "ddp"):
        yield Program(1, sharding=option, micro=2)
    # Autocast casts a leaf once in a step, also for a unit that falls back to an eager pass.
    yield Program(1, (("weight as argument",),), ((5, "autocast for a step", 0),))
    two, tied = (("plain",), ("plain",)), ((3, "head tied", 1),)
    yield Program(1, two, tied, order=(0, 1), autocast="step", micro=2)
    # The tensors of a module with a backward hook are not those that its caller uses.
    hooked = ((0, "backward hook added", 0), (2, "hooks removed", 0))
    yield Program(1, events=(*hooked, (5, "hidden used later", 0)))
    yield Program(1, (("weight as argument",),), hooked, autocast="forward")
    # A write into a view changes the history of what it is a view of.
    yield Program(1, (("unused result",), ("returned view written",)), order=(0, 1))
    yield Program(1, between="skip")
    yield Program(1, embed=False, input_grad=True)
    yield Program(1, (("reentrant checkpoint",),), ((5, "detached inputs", 0),))
    # FSDP2 keeps what autograd.grad has left on an unsharded weight for the next step.
    left = (1, "gradients returned", 0)
    yield Program(88, events=(left,), sharding="fsdp", verify_steps=1)
    # FSDP2 has freed an argument that never changes when its unit is captured.
    yield Program(
        77, (("weight as argument",), ("plain",)), order=(0, 1), frozen="head", sharding="fsdp"
    )
    yield Program(1, around=True)


class Unit(nn.Module):
    """A linear layer with a residual; its class has its features."""

    features: ClassVar[tuple[Feature, ...]] = ()
    residual = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.drop = nn.Linear(W, W), nn.Tanh(), nn.Dropout(0.0)
        self.extra = nn.ModuleList()
        self.register_parameter("late", None)
        self.gain = None
        self.scale, self.zero, self.one, self.skips = 1.0, 0.0, 1, False
        for feature in self.features:
            for name, make in feature.made.items():
                if not hasattr(self, name):
                    setattr(self, name, make())
            feature.build(self)

    def forward(self, x: Any, a: Any = None, b: Any = None, c: Any = None, d: Any = None) -> Any:
        if self.skips:
            return self._result(x, x * 0.5)
        y = x
        for feature, given in zip(self.features, (a, b, c, d), strict=False):
            y = feature.inside(self, y, given)
        for module in self.extra:
            y = module(y)
        y = self.drop(self.act(self.a(y))) * self.scale
        for scale in (getattr(self, name, None) for name in ("gain", "bonus", "late")):
            y = y if scale is None else y * scale
        if self.one is True or str(self.zero) == "-0.0":
            y = y * 0.5
        return self._result(x, x + y if self.residual else y)

    def _result(self, x: Any, y: Any) -> Any:
        for feature in self.features:
            y = feature.wrap(self, x, y)
        return y


def _unit(features: tuple[Feature, ...], residual: bool) -> Unit:
    """A unit of a class of its own."""
    made: type[Unit] = type("Unit", (Unit,), {"features": features, "residual": residual})
    return made()


class Net(nn.Module):
    """Units between two linear layers."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Linear(W, W) if program.embed else nn.Identity()
        self.units = nn.ModuleList(
            _unit(tuple(FEATURES[name] for name in names), program.residual)
            for names in program.units
        )
        self.head = nn.Linear(W, W)
        first: Any = self.units[0]
        others: dict[str, Any] = {"units": self.units[-1].a, "head": self.head}
        if program.shared:
            others[program.shared].weight = first.a.weight
        for name, parameter in self.named_parameters():
            if program.frozen and program.frozen in name:
                parameter.requires_grad_(False)

    def forward(self, x: Any, run: Any) -> Any:
        run.hidden = x = self.embed(x)
        if run.way.hooked and x.grad_fn is not None:
            x.grad_fn.register_prehook(run.keep)
        for number in self.program.order:
            unit: Any = self.units[number]
            x = x.detach() if run.way.detached else x
            given = [one.give(run, x) for one in unit.features]
            out = self._call(unit, x, given, run, number == 0)
            for one in reversed(unit.features):
                out = one.unwrap(run, unit, out)
            x, before = BETWEEN[self.program.between](run, x, out), x
            if run.way.reused:
                run.add(before.sin().mean())
        return self.head(x)

    def _call(self, unit: Any, x: Any, given: list[Any], run: Any, first: bool) -> Any:
        style = run.way.style
        if first and self.program.around:
            return checkpoint(unit, x, *given, use_reentrant=False)
        if style in ("positions", "forward"):
            return (unit.forward if style == "forward" else unit)(x, *given)
        named = {
            name: value for name, value in zip("abcd", given, strict=False) if value is not None
        }
        return unit(x, **named) if style == "names" else unit(x=x, **named)
