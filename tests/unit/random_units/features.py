"""What random units do.

A feature knows nothing of graphs. ``calls.py`` has those of arguments, results and hooks.
"""

import itertools
import os
import random
import weakref
from collections import Counter, UserDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.unit.backends.blocks import in_backward

W = 8
"""The width of everything."""
BACKEND = os.environ.get("RANDOM_UNITS_BACKEND", "tape")
DEVICE = "cpu" if BACKEND == "tape" else "cuda"
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


class World:
    """What units read and fill outside of themselves; :meth:`reset` makes it as at import."""

    calls: Counter[str]
    kept: list[Any]
    handles: list[Any]
    mask: Tensor
    factor: float

    def reset(self) -> None:
        self.refactor(0.5)
        self.calls, self.kept, self.handles = Counter(), [], []
        self.mask = torch.linspace(0.5, 1, W)
        self.other(nn.Tanh)
        os.environ.pop("RANDOM_UNITS_POWER", None)

    def other(self, kind: type[nn.Module]) -> None:
        """Let a global name be another class."""
        global _Kind
        _Kind = kind

    def refactor(self, factor: float) -> None:
        """Set the factor, and forget what was computed with another one."""
        self.factor = factor
        _factor.cache_clear()


WORLD = World()
_Kind: type[nn.Module] = nn.Tanh


class Outer(nn.Module):
    """A module outside of all units."""

    power = 0.5


class Settings(dict[str, float]):
    """A dictionary whose keys are attributes, beside its own."""

    __getattr__ = dict.__getitem__

    def __init__(self, **values: float) -> None:
        super().__init__(values)
        vars(self)["scale"] = 1.0


@dataclass
class Fields:
    power: float = 0.5


def counted(name: str, result: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    def hook(*arguments: Any) -> Any:
        WORLD.calls[name] += 1
        return result(*arguments)

    return hook


@dataclass(frozen=True)
class Feature:
    """One thing that a unit does; ``u`` is the unit, ``x`` its input, ``y`` what it computes."""

    inside: Callable[..., Any] = lambda u, y, v: y
    """The next ``y``; ``v`` is the argument that :attr:`give` made."""
    give: Callable[..., Any] = lambda run, x: None
    wrap: Callable[..., Any] = lambda u, x, y: y
    """Makes the unit's result of ``y``."""
    unwrap: Callable[..., Any] = lambda run, u, out: out
    """Takes ``y`` out of the result, in the caller."""
    build: Callable[[Any], Any] = lambda u: None
    before: Callable[..., Any] = lambda run, u: None
    """Runs in the loop before each step."""
    made: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """Attributes of the unit."""


class Doubled(torch.autograd.Function):
    """A function with a backward pass of its own, and one argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(y)
        ctx.factor = factor
        return y * factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor + ctx.saved_tensors[0] * 0.01, None


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, module: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(y)
        return module(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(y).backward(*grads)
        return y.grad, None


class Clamped(torch.autograd.Function):
    """Writes into what it is given, and passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y.clamp_(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


_nested: Any = Nested.apply


def tilted(u: Any, y: Tensor) -> Tensor:
    """``y``, whose gradient gets a factor from ``u``."""
    if y.grad_fn is not None:
        y.register_hook(lambda gradient: gradient * u.tilt)
    return y


def set_(owner: Any, name: str, value: Any) -> Any:
    setattr(owner, name, value)
    return value


def first(value: Any, *_others: Any) -> Any:
    return value


def linear() -> nn.Linear:
    return nn.Linear(W, W)


def hook_node(u: Any) -> Any:
    """Hook the node that accumulates a gradient, as wrappers for data parallelism do."""
    node = u.a.weight.expand_as(u.a.weight).grad_fn.next_functions[0][0]
    WORLD.kept.append(node)
    return node.register_hook(counted("node"))


def _route(u: Any, y: Tensor) -> Tensor:
    values, index = u.router(y).softmax(-1).topk(2)
    return y * y.new_zeros(len(y), 4).scatter(1, index, values.to(y.dtype)).sum(-1, keepdim=True)


def _island(u: Any, y: Tensor, **options: Any) -> Tensor:
    with torch.autocast(DEVICE, **options):
        return F.linear(y if "dtype" in options else y.float(), u.b.weight).to(y.dtype)


def _no_grad(write: Callable[[], Any]) -> Any:
    with torch.no_grad():
        write()


def _mean(u: Any, y: Tensor, name: str) -> Any:
    value = getattr(u, name)
    _no_grad(lambda: value.mul_(0.9).add_(y.float().mean(0), alpha=0.1))
    return y + value


def _next(u: Any, y: Tensor, name: str) -> Any:
    return y + set_(u, name, getattr(u, name) * 0.9 + y.detach().mean(0) * 0.1)


def _forked(y: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return y + torch.rand_like(y)


def _cached(u: Any, y: Tensor) -> Any:
    if u.cached is None or len(u.cached) < len(y):
        u.cached = torch.arange(0.0, len(y), device=y.device)[:, None].cos()
    return y * u.cached[: len(y)]


def _penalty(u: Any, y: Tensor) -> Tensor:
    z = y.detach().requires_grad_()
    (grad,) = torch.autograd.grad(u.b(z).square().sum(), z, create_graph=True)
    return y + grad


def _saved(u: Any, y: Tensor) -> Any:
    with save_on_cpu():
        return u.b(y).sin()


def _local(u: Any) -> None:
    class Local(torch.autograd.Function):
        power = 1.0

        class Inner:
            power = 1.0

        @staticmethod
        def forward(_ctx: Any, y: Tensor) -> Tensor:
            return y * Local.Inner.power

        @staticmethod
        def backward(_ctx: Any, *grads: Any) -> Any:
            return grads[0] * Local.Inner.power * Local.power

    u.local, u.classes = Local.apply, (Local, Local.Inner)


def _outer(u: Any) -> None:
    u.outer = [Outer()]
    u.seen = weakref.ref(u.outer[0])


def _times(y: Tensor, power: float) -> Tensor:
    return y * power


def _closure(u: Any) -> None:
    held = [torch.full((W,), 0.5)]
    u.closed, u.swap = lambda y: y * held[0], lambda value: held.__setitem__(0, value)


def _checkpointed(u: Any, y: Tensor, rate: float = 0.0, **options: Any) -> Any:
    options.setdefault("use_reentrant", False)
    return checkpoint(lambda z: F.dropout(u.b(z), rate) if rate else u.b(z).tanh(), y, **options)


def keep_loss(u: Any, y: Tensor, loss: Callable[[Tensor], Any]) -> Tensor:
    loss(y.float().square().mean())
    return y


@cache
def _factor() -> float:
    return WORLD.factor


_HALVES = torch.full((W,), 0.5)


def _from_default(one: tuple[Tensor] = (_HALVES,)) -> Tensor:
    return one[0]


def _to_default(loss: Tensor, kept: list[Tensor] = []) -> None:  # noqa: B006
    kept[:] = [loss]


def do(inside: Callable[..., Any], give: Any = None, **made: Any) -> Feature:
    """A feature that computes, with an argument if ``give`` makes one."""
    return Feature(inside, give or (lambda run, x: None), made=made)


COMPUTE = {
    "plain": Feature(),
    "mlp": do(lambda u, y, v: u.down(F.gelu(u.up(y))), up=linear, down=linear),
    "layer norm": do(lambda u, y, v: u.norm(y), norm=lambda: nn.LayerNorm(W)),
    "attention": do(
        lambda u, y, v: y + u.heads(y[None], y[None], y[None])[0][0],
        heads=lambda: nn.MultiheadAttention(W, 2, batch_first=True),
    ),
    "router": do(lambda u, y, v: _route(u, y), router=lambda: nn.Linear(W, 4)),
    "weight norm": do(lambda u, y, v: u.wn(y), wn=lambda: weight_norm(linear())),
    "spectral norm": do(lambda u, y, v: u.sn(y), sn=lambda: spectral_norm(linear())),
    "sorted": do(lambda u, y, v: y.sort(-1).values.cumsum(-1)),
    "doubles": do(lambda u, y, v: (y.double() * 3).to(y.dtype)),
    "made inside": do(lambda u, y, v: y * torch.arange(0.0, W, device=y.device) + y.new_ones(W)),
    "from a list": do(lambda u, y, v: y + torch.tensor([0.25] * W)),
    "cached by shape": do(lambda u, y, v: _cached(u, y), cached=lambda: None),
    "function": do(lambda u, y, v: Doubled.apply(y, 1.5)),  # type: ignore[no-untyped-call]
    "function in place": do(lambda u, y, v: Clamped.apply(y * 2)),  # type: ignore[no-untyped-call]
    "functional call": do(
        lambda u, y, v: torch.func.functional_call(u.b, {"weight": u.b.weight / 2}, y), b=linear
    ),
    "backward inside": do(
        lambda u, y, v: first(u.b(y), u.b(y.detach().requires_grad_()).sum().backward()), b=linear
    ),
    "gradient inside": do(lambda u, y, v: _penalty(u, y), b=linear),
    "nested backward": do(lambda u, y, v: _nested(y, u.b), b=linear),
    "nested backward beside": do(lambda u, y, v: _nested(y, u.b) + u.b(y), b=linear),
    "sdpa": do(lambda u, y, v: F.scaled_dot_product_attention(*[y[None, None]] * 3)[0, 0]),
    "saved elsewhere": do(lambda u, y, v: _saved(u, y), b=linear),
    "read on the host": do(lambda u, y, v: y * (2.0 if y.sum().item() > 0 else 1.0)),
    "rows by mask": do(lambda u, y, v: y + y[y[:, 0] > 0].sum(0)),
    "island off": do(lambda u, y, v: _island(u, y, enabled=False), b=linear),
    "island bf16": do(lambda u, y, v: _island(u, y, dtype=torch.bfloat16), b=linear),
    "no grad": do(lambda u, y, v: y + torch.no_grad()(u.b)(y), b=linear),
    "detached": do(lambda u, y, v: y + y.detach().square()),
    "dropout": do(lambda u, y, v: F.dropout(y, 0.3, u.training)),
    "rand": do(lambda u, y, v: y + torch.rand_like(y) + torch.randn(W, device=y.device)),
    "bernoulli": do(lambda u, y, v: y * torch.empty_like(y).bernoulli_(0.5)),
    "own generator": do(
        lambda u, y, v: y + torch.rand(W, generator=u.generator, device=y.device),
        generator=lambda: torch.Generator(DEVICE).manual_seed(3),
    ),
    "seed inside": do(lambda u, y, v: [torch.manual_seed(1), F.dropout(y)][1]),
    "fork rng": do(lambda u, y, v: _forked(y)),
    "python random": do(lambda u, y, v: y * (2 if random.random() < 0.5 else 1)),
    "numpy random": do(lambda u, y, v: y * float(np.random.rand())),
    "checkpoint": do(lambda u, y, v: _checkpointed(u, y), b=linear),
    "checkpointed dropout": do(
        lambda u, y, v: _checkpointed(u, y, 0.2, use_reentrant=False), b=linear
    ),
    "checkpoint without rng": do(
        lambda u, y, v: _checkpointed(u, y, preserve_rng_state=False), b=linear
    ),
    "reentrant checkpoint": do(lambda u, y, v: _checkpointed(u, y, use_reentrant=True), b=linear),
    "clone written": do(lambda u, y, v: first(z := y.clone(), z.mul_(2), z[:, 1].zero_())),
    "relu in place": do(lambda u, y, v: F.leaky_relu(y * 2, 0.1, inplace=True)),
    "input written": Feature(lambda u, y, v: y * 1.0, wrap=lambda u, x, y: y + x.mul_(0.5)),
    "input data written": Feature(wrap=lambda u, x, y: first(y, x.data.mul_(0.5))),
}
STATE = {
    "weight twice": do(lambda u, y, v: torch.tanh(y @ u.a.weight) @ u.a.weight.t()),
    "module twice": do(lambda u, y, v: u.b(torch.tanh(u.b(y))), b=linear),
    "weight detached": do(lambda u, y, v: y * u.a.weight.detach().mean()),
    "frozen": do(lambda u, y, v: u.c(y), c=lambda: linear().requires_grad_(False)),
    "unused weight": do(lambda u, y, v: y, unused=linear),
    "hidden module": Feature(
        lambda u, y, v: u.hidden[0](y),
        unwrap=lambda run, u, out: first(out, run.see("hidden", u.hidden[0].weight.grad)),
        made={"hidden": lambda: [linear()]},
    ),
    "weight written": do(lambda u, y, v: first(y, _no_grad(lambda: u.a.weight.mul_(0.99)))),
    "frozen weight written": do(
        lambda u, y, v: (_no_grad(lambda: u.d.weight.lerp_(u.a.weight, 0.1)), u.d(y))[1],
        d=lambda: linear().requires_grad_(False),
    ),
    "batch norm": do(lambda u, y, v: u.bn(y), bn=lambda: nn.BatchNorm1d(W)),
    "buffer read": do(lambda u, y, v: y * u.table, table=lambda: nn.Buffer(torch.ones(W))),
    "buffer in place": do(
        lambda u, y, v: _mean(u, y, "mean"), mean=lambda: nn.Buffer(torch.zeros(W))
    ),
    "buffer replaced": do(
        lambda u, y, v: _next(u, y, "past"), past=lambda: nn.Buffer(torch.zeros(W))
    ),
    "attribute read": do(lambda u, y, v: y * u.table, table=lambda: torch.ones(W)),
    "attribute in place": do(lambda u, y, v: _mean(u, y, "ema"), ema=lambda: torch.zeros(W)),
    "attribute replaced": do(lambda u, y, v: _next(u, y, "state"), state=lambda: torch.zeros(W)),
    "metric kept": Feature(
        lambda u, y, v: first(y, set_(u, "metric", y.detach().square().mean())),
        unwrap=lambda run, u, out: first(out, run.see("metric", u.metric)),
    ),
    "loss kept": Feature(
        lambda u, y, v: keep_loss(u, y, lambda loss: set_(u, "aux", loss)),
        unwrap=lambda run, u, out: first(out, run.add(u.aux)),
    ),
    "list attribute filled": do(
        lambda u, y, v: keep_loss(u, y, u.history.append), history=lambda: []
    ),
    "dict attribute filled": Feature(
        lambda u, y, v: keep_loss(u, y, lambda loss: u.memo.update(loss=loss)),
        unwrap=lambda run, u, out: first(out, run.add(u.memo["loss"])),
        made={"memo": dict},
    ),
    "list attribute read": do(
        lambda u, y, v: y * u.tensors[0], tensors=lambda: [torch.full((W,), 0.5)]
    ),
    "dict attribute read": do(
        lambda u, y, v: y * u.named["scale"], named=lambda: {"scale": torch.full((W,), 0.5)}
    ),
    "object read": do(
        lambda u, y, v: y * u.box.inner, box=lambda: SimpleNamespace(inner=torch.ones(W))
    ),
    "class attribute read": Feature(
        lambda u, y, v: y * u.common, build=lambda u: set_(type(u), "common", torch.ones(W))
    ),
    "global read": do(lambda u, y, v: y * WORLD.mask),
    "cached function": do(lambda u, y, v: y * _factor()),
    "global filled": do(lambda u, y, v: keep_loss(u, y, WORLD.kept.append)),
    "default read": do(lambda u, y, v: y * u.from_default(), from_default=lambda: _from_default),
    "default filled": do(
        lambda u, y, v: keep_loss(u, y, u.to_default), to_default=lambda: _to_default
    ),
    "other module read": Feature(lambda u, y, v: y * u.outer[0].power, build=_outer),
    "other module by weak reference": Feature(lambda u, y, v: y * u.seen().power, build=_outer),
    "option asked for": do(
        lambda u, y, v: y * getattr(u.options, "power", 1.0), options=SimpleNamespace
    ),
    "class asked": do(lambda u, y, v: y * getattr(u, "power", 1.0)),
    "fields of an object": do(
        lambda u, y, v: _times(y, **asdict(u.fields)) * len(u.pairs),
        # More than are looked at if each counts as an object.
        pairs=lambda: [(number,) for number in range(1500)],
        fields=Fields,
    ),
    "method of a class": Feature(
        lambda u, y, v: y * u.power(), build=lambda u: set_(type(u), "power", lambda _: 0.5)
    ),
    "global class": do(lambda u, y, v: _Kind()(y)),
    "environment": do(lambda u, y, v: y * float(os.environ.get("RANDOM_UNITS_POWER", "0.5"))),
    "user's dict": do(lambda u, y, v: y * u.powers["one"], powers=lambda: UserDict(one=0.5)),
    "dict of attributes": do(
        lambda u, y, v: y * u.settings.power * u.settings.scale,
        settings=lambda: Settings(power=0.5),
    ),
    "array of one number": do(lambda u, y, v: y * float(u.power), power=lambda: np.array(0.5)),
    "attribute of a weight": do(lambda u, y, v: y * getattr(u.a.weight, "power", 1.0)),
    "attribute of a result": Feature(
        wrap=lambda u, x, y: first(y, set_(y, "power", 0.5)),
        unwrap=lambda run, u, out: out * getattr(out, "power", 1.0),
    ),
    "counter of another module": Feature(
        lambda u, y, v: first(y, set_(u.outer[0], "power", u.outer[0].power + 1)),
        unwrap=lambda run, u, out: first(out, run.see("power", u.outer[0].power)),
        build=_outer,
    ),
    "leaf asked": do(lambda u, y, v: y * (1.0 if y.is_leaf else 0.5)),
    "node asked": do(lambda u, y, v: y * (1.0 if y.grad_fn is None else 0.5)),
    "gradient of a weight read": do(lambda u, y, v: y * (1.0 if u.a.weight.grad is None else 0.5)),
    "iterator in a list": do(
        lambda u, y, v: y * next(u.turns[0]), turns=lambda: [itertools.repeat(0.5)]
    ),
    "local class read": Feature(lambda u, y, v: u.local(y), build=_local),
    "closure read": Feature(lambda u, y, v: u.closed(y), build=_closure),
    "counter": do(lambda u, y, v: y * (1 + set_(u, "count", u.count + 1) % 2), count=lambda: 0),
    "counter in backward": do(
        lambda u, y, v: in_backward(y, lambda g: first(g, set_(u, "passes", u.passes + 1))),
        passes=lambda: 0,
    ),
    "iterator": do(lambda u, y, v: y * next(u.turns), turns=lambda: itertools.repeat(0.5)),
    "drawn by an object": do(
        lambda u, y, v: y * (1 + (u.dice.random.random() < 0.5)),
        dice=lambda: SimpleNamespace(random=random.Random(3)),
    ),
    "hook with state": do(lambda u, y, v: tilted(u, y * 1.0), tilt=lambda: 1.0),
    "call count": do(lambda u, y, v: first(y, set_(u, "n", u.n + 1)), n=lambda: 0),
    "temperature": Feature(
        lambda u, y, v: y / u.warmth,
        before=lambda run, u: set_(u, "warmth", 1.0 + run.s // 4),
        made={"warmth": lambda: 1.0},
    ),
    "dropout schedule": Feature(before=lambda run, u: set_(u.drop, "p", run.s // 4 / 10)),
    "warmup by the loop": Feature(
        lambda u, y, v: y * u.factor,
        before=lambda run, u: set_(u, "factor", run.s / 10),
        made={"factor": lambda: 0.0},
    ),
}
