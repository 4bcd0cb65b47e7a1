"""Random programs: a model of units, and what happens while it is trained."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import nn

from tests.unit.random_units.calls import FEATURES, HARD
from tests.unit.random_units.events import AFTER, AROUND, BETWEEN, EVENTS, RARE
from tests.unit.random_units.features import COMPUTE, STATE, Feature, W

STEPS, ROWS = 7, 5
"""Steps of a program, and rows of a batch."""
SHARED = ("", "", "", "units", "head")
FROZEN = ("", "", "", "embed", "units.0.", ".bias", "units.0.a.weight", "head")
EASY = [name for name in FEATURES if name not in HARD]
HAPPENS = EVENTS | RARE | {name: one for each in AFTER.values() for name, one in each.items()}
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
    """Around the ``forward`` pass, ``backward`` or the whole ``step``; ``uncached`` or not."""
    sharding: str = ""
    optimizer: str = "SGD"
    residual: bool = True
    """Whether units add their input to what they compute."""
    micro: int = 1
    """Microbatches of a step."""
    embed: bool = True
    input_grad: bool = False
    around: str = ""
    """What is around each call of the first unit."""
    warmup: int = 2
    verify_interval: int = 0
    verify_steps: int = 0
    separate: bool = False
    """Whether units take their arguments through views, eagerly too."""

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
        "a checkpoint" if chance.random() < 0.02 else "",
        chance.choice((2, 2, 3)),
        chance.choice((0, 0, 0, 1, 2)),
        chance.choice((0, 0, 0, 1, 2)),
        chance.random() < 0.5,
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
    yield Program(1, embed=False, input_grad=True)
    yield from ENDS


def _one(feature: str = "plain", *happens: str, at: int = 5, **options: Any) -> Program:
    return Program(1, ((feature,),), tuple((at, event, 0) for event in happens), **options)


_TWO = (("plain",), ("plain",))
_HOOKED = ((0, "backward hook added", 0), (2, "hooks removed", 0))
_KEPT = ((3, "result kept", 0), (5, "result dropped", 0))
_SHARED = "unit-shared-gradients"
_MEMORY = "what is done with its results and arguments outside"
_LATER = "gradients from outside was something else at capture and is "
ENDS = {
    # A pass is captured under the autocast around it in eager training.
    **{
        _one("island off", autocast=place, verify_interval=interval): "equal"
        for place in ("forward", "backward", "step")
        for interval in (0, 1)
    },
    _one("island off", "autocast in forward"): "equal",
    _one("island off", "autocast in backward"): "cpu in the backward pass was off",
    # A weight is replaced after the last observed step: one more is observed.
    Program(
        1, events=((3, "parameter replaced", 0), (5, "head tied", 0)), autocast="forward", warmup=3
    ): f"{_LATER}a weight",
    _one("plain", "casts not kept", autocast="forward"): "equal",
    # Without the cache, weights are shared and casts of them are not.
    Program(1, order=(0, 0), autocast="forward uncached"): "equal",
    Program(1, _TWO, order=(0, 1), shared="units", autocast="forward uncached"): "equal",
    # Autocast casts a leaf once in a step, also for a unit that falls back to an eager pass.
    _one("weight as argument", "autocast for a step"): "equal",
    Program(1, _TWO, ((3, "head tied", 1),), order=(0, 1), autocast="step", micro=2): (
        f"{_LATER}a weight"
    ),
    # The tensors of a module with a backward hook are not those that its caller uses.
    Program(1, events=(*_HOOKED, (5, "hidden used later", 0))): f"{_LATER}x, used",
    # Autocast caches no cast of a view.
    Program(1, (("weight as argument",),), _HOOKED, autocast="forward"): "equal",
    # The memory of a replay holds what its backward pass reads until that is over.
    Program(1, _TWO, ((5, "another order", 0),), order=(0, 1)): "equal",
    Program(1, _TWO, ((5, "a unit twice", 0),), order=(0, 1)): "equal",
    Program(1, _TWO, ((5, "two forward passes", 0),), order=(0, 1)): "equal",
    # A write into a view changes the history of what it is a view of.
    Program(1, (("unused result",), ("returned view written",)), order=(0, 1)): "unit-view-written",
    Program(
        1, (("transposed result",),), order=(0, 0), between="a view written", autocast="step"
    ): _SHARED,
    _one("transposed result", between="a view written"): "equal",
    _one("view of a used tensor", "results written", at=1): _SHARED,
    **{_one(one, "results written"): _MEMORY for one in ("view of a used tensor", "views of one")},
    _one("views of one", "results written", frozen="units.0.", embed=False): _MEMORY,
    Program(1, (("doubles", "view of the input returned"),), ((5, "results written", 0),)): _MEMORY,
    _one("reentrant checkpoint", "detached inputs"): "equal",
    # FSDP2 keeps what autograd.grad has left on an unsharded weight for the next step.
    Program(88, events=((1, "gradients returned", 0),), sharding="fsdp", verify_steps=1): "equal",
    # FSDP2 has freed an argument that never changes when its unit is captured.
    Program(
        77, (("weight as argument",), ("plain",)), order=(0, 1), frozen="head", sharding="fsdp"
    ): "equal",
    # Autograd adds the gradients of an input's two uses inside and one outside in another order.
    _one(between="skip"): _SHARED,
    _one("plain", "hidden used later"): f"{_LATER}x, used",
    _one("pre-hook", "hooks removed", at=4, between="skip"): f"{_LATER}x, used",
    _one("plain", "hidden used earlier"): "equal",
    _one("weight twice", "head tied"): f"{_LATER}a parameter",
    _one("weight twice", "embed tied"): "equal",
    # Views of arguments sum the uses inside, in the eager run too.
    _one(between="skip", separate=True): "equal",
    _one("inputs in containers", between="skip", separate=True, verify_interval=1): "equal",
    _one("plain", "fewer rows", between="skip", separate=True): "equal",
    _one(between="skip", separate=True, verify_steps=1): "equal",
    _one("weight twice", shared="head", separate=True): _SHARED,
    # The gradient of a result that its unit uses comes from outside alone.
    _one("tuple", "result hooked", at=1): _SHARED,
    _one("unused result", "result hooked and written", at=1): _SHARED,
    _one("tuple", "gradients accumulated", at=1): _SHARED,
    # FSDP2 has hooks on what its modules return, and reads no gradient there.
    _one("tuple", sharding="fsdp"): "equal",
    _one("tuple", "result's gradient retained", at=1): _SHARED,
    _one("tuple", "result's gradient taken", at=1): _SHARED,
    _one("tuple", "result's gradient taken"): f"{_LATER}a result",
    _one("tuple", "result hooked"): f"{_LATER}a result",
    _one("tuple", "result's gradient retained"): f"{_LATER}a result",
    # Until a result is dropped its unit runs eagerly, and then gives copies.
    _one("plain", "result kept", at=3): "equal",
    Program(1, (("tuple",),), (*_KEPT, (6, "result's gradient taken", 0))): f"{_LATER}a result",
    # A graph has one backward pass, and no second derivative.
    # A unit returns its argument, which needs a gradient in the second call of a step alone.
    Program(
        1, (("input returned",),), order=(0, 0), frozen="embed", verify_interval=1, separate=True
    ): "equal",
    _one("view of the input returned", micro=2): "equal",
    # FSDP2 makes a class of torch's from a unit's, whose code is observed as before.
    _one("local class read", "class in a class", sharding="fsdp"): "equal",
    _one("nested backward", "hidden gradient kept"): "which gradients a backward pass computes",
    _one("backward inside"): "runs a backward pass in its forward pass",
    _one("loss kept"): "sets attribute aux in its forward pass",
    _one("plain", "two backward passes", at=1): "unit-backward-again",
    _one("plain", "two backward passes"): "or a second time",
    _one("plain", "penalty", at=1): "unit-backward-again",
    _one("plain", "penalty"): "runs with create_graph=True",
    _one("plain", "graph kept"): "equal",
    # A replay saves no tensors that a checkpoint could pair with those of its second pass.
    **{_one(around=how): "unit-recomputed" for how in AROUND},
    **{_one("plain", how): "equal" for how in AROUND},
}
"""Programs that were once trained otherwise, and how they end: equal, or what refuses them."""


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
    made: type[Unit] = type("Unit", (Unit,), {"features": features, "residual": residual})
    return made()


class Net(nn.Module):
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
        for number in run.way.order:
            unit: Any = self.units[number]
            x = x.detach() if run.way.detached else x
            if run.way.earlier:
                run.add(x.sin().mean())
            given = [one.give(run, x) for one in unit.features]
            out = self._call(unit, x, given, run, number == 0)
            for one in reversed(unit.features):
                out = one.unwrap(run, unit, out)
            run.made = out
            if run.way.read is not None:
                run.way.read(out)
            x, before = BETWEEN[self.program.between](run, x, out), x
            if run.way.reused:
                run.add(before.sin().mean())
        return self.head(x)

    def _call(self, unit: Any, x: Any, given: list[Any], run: Any, first: bool) -> Any:
        style = run.way.style
        if first and run.way.around:
            return AROUND[run.way.around](unit, x, *given)
        if style in ("positions", "forward"):
            return (unit.forward if style == "forward" else unit)(x, *given)
        named = {
            name: value for name, value in zip("abcd", given, strict=False) if value is not None
        }
        return unit(x, **named) if style == "names" else unit(x=x, **named)
