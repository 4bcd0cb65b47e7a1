"""What happens between the steps of random units, and what the model does between its units."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.random_units.calls import HOOKS
from tests.unit.random_units.features import WORLD, W, counted, hook_node, linear, set_


def _trained(run: Any, weight: nn.Parameter) -> nn.Parameter:
    run.optimizer.add_param_group({"params": [weight]})
    return weight


def _grow(run: Any, u: Any) -> None:
    torch.manual_seed(run.s)
    u.extra.append(linear())
    for weight in u.extra[-1].parameters():
        _trained(run, weight)


def _toggle(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(not parameter.requires_grad)


def _way(**options: Any) -> Callable[..., Any]:
    return lambda run, u: vars(run.way).update(options)


def _hook(register: Callable[[Any], Any], name: str, then: Any = lambda *_: None) -> Any:
    return lambda run, u: WORLD.handles.append(register(u)(counted(name, then)))


def _loaded(run: Any, u: Any) -> None:
    run.net.load_state_dict({name: one * 0.9 for name, one in run.net.state_dict().items()})


_WAYS = {
    "fewer rows": _way(rows=3),
    "another microbatch": lambda run, u: _way(micro=run.way.micro + 1)(run, u),
    "evaluation": _way(after=torch.no_grad, training=False),
    "evaluation with grad": _way(after=torch.enable_grad, training=False),
    "pass without grad": _way(after=torch.no_grad),
    "inference mode": _way(after=torch.inference_mode, training=False),
    "forward alone": _way(abandoned=True),
    "outputs kept": _way(kept=True),
    "input gradients kept": _way(hooked=True),
    "hidden gradient kept": _way(by_hidden=True),
    "hidden used later": _way(reused=True),
    "anomaly mode": _way(anomaly=True),
    "zeroed": _way(to_none=False),
    "autocast for a step": _way(autocast="step"),
    "two backward passes": _way(retain=True),
    "gradients returned": _way(by_grad=True),
    "detached inputs": _way(detached=True),
    "named": _way(style="names"),
    "trained in eval mode": lambda run, u: run.net.eval(),
    "train mode": lambda run, u: run.net.train(),
    "seed": lambda run, u: torch.manual_seed(run.s),
    "state loaded": _loaded,
    "no flash attention": lambda run, u: torch.backends.cuda.enable_flash_sdp(False),
    "no TF32": lambda run, u: set_(torch.backends.cudnn, "allow_tf32", False),
    "deterministic": lambda run, u: torch.use_deterministic_algorithms(True),
}
_CHANGES = {
    "submodule added": _grow,
    "parameter added": lambda run, u: set_(u, "late", _trained(run, nn.Parameter(torch.ones(W)))),
    "parameter replaced": lambda run, u: set_(
        u.a, "weight", _trained(run, nn.Parameter(torch.full((W, W), 0.1)))
    ),
    "head tied": lambda run, u: set_(run.net.head, "weight", u.a.weight),
    "module replaced": lambda run, u: set_(u, "act", nn.Sigmoid()),
    "class of a module": lambda run, u: set_(u.act, "__class__", nn.Sigmoid),
    "buffer added": lambda run, u: u.register_buffer("bonus", torch.full((W,), 0.5)),
    "gain": lambda run, u: set_(u, "gain", torch.full((W,), 0.45 + run.s / 10)),
    "no gain": lambda run, u: set_(u, "gain", None),
    "early exit": lambda run, u: set_(u, "skips", not u.skips),
    "scale": lambda run, u: set_(u, "scale", u.scale * 0.5),
    "minus zero": lambda run, u: set_(u, "zero", -u.zero),
    "True": lambda run, u: set_(u, "one", True),
    "dropout rate": lambda run, u: set_(u.drop, "p", 0.3),
    "part in eval mode": lambda run, u: u.drop.train(not u.drop.training),
    "weight data transposed": lambda run, u: set_(u.a.weight, "data", u.a.weight.data.t()),
    "weight data replaced": lambda run, u: set_(u.a.weight, "data", u.a.weight.data.clone()),
    "weight written": lambda run, u: u.a.weight.data.mul_(0.5),
    "weight frozen or not": lambda run, u: _toggle(u.a.weight),
    "bias frozen or not": lambda run, u: _toggle(u.a.bias),
    "forward patched": lambda run, u: set_(u.a, "forward", lambda y: F.linear(y, u.a.weight)),
    "hook added": _hook(lambda u: u.register_forward_hook, "unit", lambda *a: a[2] * 0.9),
    "pre-hook added": _hook(lambda u: u.register_forward_pre_hook, "pre"),
    "hook added inside": _hook(lambda u: u.a.register_forward_hook, "in", lambda *a: a[2] * 0.9),
    "backward hook added": _hook(lambda u: u.register_full_backward_hook, "backward"),
    "parameter hook added": _hook(lambda u: u.a.weight.register_hook, "weight", lambda g: g / 2),
    "global hook added": _hook(lambda u: nn.modules.module.register_module_forward_hook, "all"),
    "node hook added": lambda run, u: WORLD.handles.append(hook_node(u)),
}
EVENTS: dict[str, Callable[..., Any]] = {**_WAYS, **_CHANGES}
"""Any of them may happen in any program."""
_TABLES = {
    "table replaced": lambda run, u: set_(u, "table", u.table * 0.5),
    "table written": lambda run, u: u.table.mul_(0.5),
}
_OUTER = {"other module changed": lambda run, u: set_(u.outer[0], "power", 0.25)}
_WRITES = {"results written": _way(writes=True)}
_NO_HOOKS = {"hooks removed": lambda run, u: [one.remove() for one in WORLD.handles]}
AFTER: dict[str, dict[str, Callable[..., Any]]] = {
    "buffer read": _TABLES,
    "attribute read": _TABLES,
    "same table": {"table written": lambda run, u: run.table.mul_(0.5)},
    "global read": {"mask replaced": lambda run, u: set_(WORLD, "mask", WORLD.mask * 0.9)},
    "cached function": {"cache cleared": lambda run, u: WORLD.refactor(0.25)},
    "local class read": {
        "class in a closure": lambda run, u: set_(u.classes[0], "power", 0.5),
        "class in a class": lambda run, u: set_(u.classes[1], "power", 0.5),
    },
    "closure read": {"closure replaced": lambda run, u: u.swap(torch.full((W,), 0.25))},
    "list attribute read": {"entry": lambda run, u: u.tensors.__setitem__(0, torch.ones(W))},
    "dict attribute read": {"value": lambda run, u: u.named.update(scale=torch.ones(W))},
    "object read": {"object replaced": lambda run, u: set_(u.box, "inner", u.box.inner * 0.5)},
    "hook with state": {"hook's state": lambda run, u: set_(u, "tilt", 0.5)},
    "class attribute read": {"class changed": lambda run, u: set_(type(u), "common", u.common / 2)},
    "other module read": _OUTER,
    "other module by weak reference": _OUTER,
    "option asked for": {"option": lambda run, u: set_(u.options, "power", 0.5)},
    "class asked": {"power of the class": lambda run, u: set_(type(u), "power", 0.5)},
    "fields of an object": {"field": lambda run, u: set_(u.fields, "power", 0.25)},
    "method of a class": {
        "method patched": lambda run, u: set_(type(u), "power", lambda _: 0.25),
        "forward of the class": lambda run, u: set_(type(u), "forward", lambda u, x, *_: u.a(x)),
    },
    "global class": {"another class": lambda run, u: WORLD.other(nn.Sigmoid)},
    "environment": {"variable": lambda run, u: os.environ.update(RANDOM_UNITS_POWER="0.25")},
    "user's dict": {"another power": lambda run, u: u.powers.update(one=0.25)},
    "dict of attributes": {
        "key": lambda run, u: u.settings.update(power=0.25),
        "attribute of a dict": lambda run, u: set_(u.settings, "scale", 0.5),
        "another dict": lambda run, u: set_(u, "settings", type(u.settings)(power=0.1)),
    },
    "array of one number": {"number": lambda run, u: u.power.fill(0.25)},
    "attribute of a weight": {"gain of a weight": lambda run, u: set_(u.a.weight, "power", 0.25)},
    **dict.fromkeys(("view of a used tensor", "views of one"), _WRITES),
    "view of the input returned": _WRITES,
    **dict.fromkeys(HOOKS, _NO_HOOKS),
}
"""What may happen in programs that have the feature."""


def _with_sine(unit: Any, *given: Any) -> Any:
    out = unit(*given)
    return out.sin() if isinstance(out, torch.Tensor) else out


def _under_hooks(unit: Any, *given: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return unit(*given)


AROUND: dict[str, Callable[..., Any]] = {
    "a checkpoint": partial(checkpoint, _with_sine, use_reentrant=False),
    "a reentrant checkpoint": partial(checkpoint, _with_sine, use_reentrant=True),
    "hooks on saved tensors": _under_hooks,
}
"""What may be around a call of the first unit."""
RARE: dict[str, Callable[..., Any]] = {
    "autocast in forward": _way(autocast="forward"),
    "autocast in backward": _way(autocast="backward"),
    "casts not kept": _way(autocast="forward uncached"),
    "another order": _way(order=(1, 0)),
    "a unit twice": _way(order=(0, 0, 1)),
    "two forward passes": _way(forwards=2),
    "embed tied": lambda run, u: set_(run.net.embed, "weight", u.a.weight),
    "hidden used earlier": _way(earlier=True),
    "graph kept": _way(retain="once"),
    "penalty": _way(penalty=True),
    "result's gradient taken": _way(by_result=True),
    "result kept": _way(read=lambda y: set_(WORLD, "kept", [y])),
    "result dropped": lambda run, u: set_(WORLD, "kept", []),
    "result hooked": _way(read=lambda y: y.register_hook(lambda _: None)),
    # Torch gives it new hooks, and keeps those of the value before.
    "result hooked and written": _way(read=lambda y: (y.register_hook(lambda g: g * 2), y.mul_(2))),
    "gradients accumulated": _way(by_inputs=True),
    "result's gradient retained": _way(read=torch.Tensor.retain_grad),
    **{how: _way(around=how) for how in AROUND},
}
"""What happens in no program that is drawn."""
BETWEEN: dict[str, Callable[..., Any]] = {
    "nothing": lambda run, x, out: out,
    "skip": lambda run, x, out: out + x,
    "skip of a product": lambda run, x, out: out * 0.5 + x.sin() + x,
    "written": lambda run, x, out: out.mul_(0.9),
    "a view written": lambda run, x, out: (out[:, :1].add_(1), out)[1],
    "detached": lambda run, x, out: (run.add(out.square().mean()), out.detach())[1],
    "expanded gradient": lambda run, x, out: (run.add(out.sum() * 0.01), out.detach())[1],
    "averaged": lambda run, x, out: torch.tanh(out.mean(0).expand_as(out)),
    "columns first": lambda run, x, out: (out.t() @ run.rand(len(x), len(x))).t(),
    "all summed": lambda run, x, out: (run.add(out.sin().mean()), out)[1],
    "read": lambda run, x, out: (run.see("between", out), out)[1],
    "strided": lambda run, x, out: torch.stack([out, out.sin()], -1)[..., 0],
}
"""What the model does between its units."""
