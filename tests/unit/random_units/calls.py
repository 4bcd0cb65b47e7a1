"""What random units take, what they return, and the hooks on them; and all features by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.random_units.features import (
    COMPUTE,
    STATE,
    WORLD,
    Feature,
    W,
    counted,
    do,
    first,
    hook_node,
    keep_loss,
    set_,
)


class Pair(NamedTuple):
    main: Any
    more: Any


@dataclass
class Record:
    main: Any
    more: Any


class Tagged(Tensor):
    """A subclass of tensors."""


def _hooked(y: Tensor) -> Tensor:
    y = y * 1.0
    if y.requires_grad:
        y.register_hook(counted("tensor", lambda grad: grad * 0.5))
    return y


def _tagged(run: Any) -> Any:
    tensor: Any = run.rand(W)
    tensor.tag = 2 + run.s // 4
    return tensor


def result(wrap: Any, unwrap: Any = lambda run, u, out: out[0], loss: Any = None) -> Feature:
    """A feature that returns more; ``loss`` takes a term of the loss out of it."""
    if loss is None:
        return Feature(wrap=wrap, unwrap=unwrap)
    return Feature(
        wrap=wrap, unwrap=lambda run, u, out: first(unwrap(run, u, out), run.add(loss(out)))
    )


def written(run: Any, value: Tensor) -> Tensor:
    """A result, written into if the step does so."""
    return value.mul_(0.5) if run.way.writes else value


def hooked(build: Callable[[Any], Any]) -> Feature:
    return Feature(build=lambda u: WORLD.handles.append(build(u)))


ARGUMENTS = {
    "mask": do(lambda u, y, v: y.masked_fill(v, 0.0), lambda run, x: run.rand(W) > 0.8),
    "index": do(
        lambda u, y, v: y + u.embedding(v),
        lambda run, x: (run.rand(len(x)) * 5).long(),
        embedding=lambda: nn.Embedding(5, W),
    ),
    "nested argument": do(
        lambda u, y, v: y * v[0][0] * v[0][1] + v[1]["k"][0],
        lambda run, x: ((run.rand(W), 2), {"k": [run.rand(len(x), W), None]}),
    ),
    "inputs in containers": do(
        lambda u, y, v: y * v[0][0] + v[1]["k"].sin() + v[0][1],
        lambda run, x: ((x, x.cos()), {"k": x}),
    ),
    "constants": do(
        lambda u, y, v: getattr(torch, v[1])(y * v[0]) if v[2] and v[3] is None else y,
        lambda run, x: (1.5, "tanh", True, None),
    ),
    "number that changes": do(
        lambda u, y, v: y + y.new_ones(W).div(v).clamp(-1, 1),
        lambda run, x: 0.0 if run.s < 5 else -0.0,
    ),
    "one and True": do(
        lambda u, y, v: y * (2 if v is True else 1), lambda run, x: 1 if run.s < 5 else True
    ),
    "tensor or None": do(
        lambda u, y, v: y if v is None else y * v, lambda run, x: run.rand(W) if run.s < 5 else None
    ),
    "None or tensor": do(
        lambda u, y, v: y if v is None else y * v, lambda run, x: None if run.s < 5 else run.rand(W)
    ),
    "input twice": do(lambda u, y, v: y * v, lambda run, x: x),
    "view of the input": do(lambda u, y, v: y * v, lambda run, x: x[:, :1]),
    "expanded": do(lambda u, y, v: y * v, lambda run, x: run.rand(1, W).expand(len(x), W)),
    "transposed": do(lambda u, y, v: y * v, lambda run, x: run.rand(W, len(x)).t()),
    "scalar and empty": do(
        lambda u, y, v: y * v[0] + v[1].sum(), lambda run, x: (run.rand(), run.rand(0))
    ),
    "same table": do(lambda u, y, v: y * v, lambda run, x: run.table),
    "leaf": do(lambda u, y, v: y * v, lambda run, x: run.leaf),
    "weight as argument": do(
        lambda u, y, v: F.linear(y, v), lambda run, x: (w := run.net.head.weight).view_as(w)
    ),
    "dtype and shape": do(
        lambda u, y, v: y.to(v[0]).view(v[1]), lambda run, x: (torch.float32, x.shape)
    ),
    "NamedTuple given": do(lambda u, y, v: y * v.main, lambda run, x: Pair(run.rand(W), 1)),
    "dataclass given": do(lambda u, y, v: y * v.main, lambda run, x: Record(run.rand(W), 1)),
    "argument written": do(lambda u, y, v: y * v.add_(1), lambda run, x: run.tally),
    "list filled": do(lambda u, y, v: keep_loss(u, y, v.append), lambda run, x: run.terms),
    "dict filled": Feature(
        lambda u, y, v: keep_loss(u, y, lambda loss: v.update(loss=loss)),
        lambda run, x: set_(run, "into", {}),
        unwrap=lambda run, u, out: first(out, run.add(run.into["loss"])),
    ),
    "sparse": do(
        lambda u, y, v: torch.sparse.mm(v, y), lambda run, x: torch.eye(len(x)).to_sparse()
    ),
    "tagged": do(lambda u, y, v: y * v.tag, lambda run, x: _tagged(run)),
    "subclass": do(
        lambda u, y, v: y * v.as_subclass(Tensor), lambda run, x: run.rand(W).as_subclass(Tagged)
    ),
}
RESULTS = {
    "tuple": result(lambda u, x, y: (y, y.square().mean()), loss=lambda out: out[1]),
    "dict": result(
        lambda u, x, y: {"main": y, "more": {"loss": y.abs().mean()}},
        lambda run, u, out: out["main"],
        lambda out: out["more"]["loss"],
    ),
    "NamedTuple": result(
        lambda u, x, y: Pair(y, y.mean()), lambda run, u, out: out.main, lambda out: out.more
    ),
    "dataclass": result(
        lambda u, x, y: (Record(y, {"mean": y.mean()}), None),
        lambda run, u, out: out[0].main,
        lambda out: out[0].more["mean"],
    ),
    "unused result": result(lambda u, x, y: (y, y * 2)),
    "metric returned": result(
        lambda u, x, y: [y, y.detach().mean(), y.argmax(-1)],
        lambda run, u, out: first(out[0], run.see("returned", out[1:])),
    ),
    "None and numbers": result(
        lambda u, x, y: [None, y, 1, 2.5, "text", True, y.shape, u.scale],
        lambda run, u, out: first(out[1], run.see("constants", str([out[0], *out[2:]]))),
    ),
    "weight returned": result(
        lambda u, x, y: (y, u.a.weight), loss=lambda out: out[1].square().mean()
    ),
    "input returned": result(lambda u, x, y: (y, x), lambda run, u, out: out[0] + out[1].sin()),
    "view of the input returned": result(
        lambda u, x, y: (y, x[:, :1]), lambda run, u, out: out[0] * written(run, out[1])
    ),
    "view of a used tensor": result(
        lambda u, x, y: (y.t(), (y * 0.1).sum(), (y * 0.3).mean()),
        lambda run, u, out: written(run, out[0]).t(),
        lambda out: out[1] + out[2],
    ),
    "views of one": result(
        lambda u, x, y: (z := y * 1.0, z.view(-1)[:W]),
        lambda run, u, out: written(run, out[0]) + out[1],
    ),
    "same twice": result(
        lambda u, x, y: (z := y * 1.0, z), lambda run, u, out: out[0].mul_(0.5) + out[1]
    ),
    "two views": result(
        lambda u, x, y: (y[:, :4], y[:, 4:]), lambda run, u, out: torch.cat(out, 1)
    ),
    "whole and part written": result(
        lambda u, x, y: (z := y * 1.0, z[:, :1]), lambda run, u, out: out[0].mul_(0.5) + out[1]
    ),
    "transposed result": result(lambda u, x, y: y.t(), lambda run, u, out: out.t()),
    "result written": result(
        lambda u, x, y: y * 1.0, lambda run, u, out: first(out, out[:1].mul_(0.5))
    ),
    "returned view written": Feature(
        lambda u, y, v: y * 1.0,
        wrap=lambda u, x, y: (y * 1.0, x.view_as(x)),
        unwrap=lambda run, u, out: first(out[0] + out[1].mul_(0.5), run.see("written", out[1])),
    ),
}
HOOKS = {
    "hook": hooked(lambda u: u.register_forward_hook(counted("unit", lambda *a: a[2]))),
    "pre-hook": hooked(
        lambda u: u.register_forward_pre_hook(counted("pre", lambda u, a: (a[0] * 0.9, *a[1:])))
    ),
    "backward hook": hooked(lambda u: u.register_full_backward_hook(counted("backward"))),
    "parameter hook": hooked(
        lambda u: u.a.weight.register_hook(counted("weight", lambda grad: grad * 0.5))
    ),
    "after accumulation": hooked(
        lambda u: u.a.bias.register_post_accumulate_grad_hook(
            counted("bias", lambda p: first(None, p.grad.mul_(0.5)))
        )
    ),
    "hook inside": hooked(
        lambda u: u.a.register_forward_hook(counted("inside", lambda *a: a[2] * 0.9))
    ),
    "backward hook inside": hooked(lambda u: u.a.register_full_backward_hook(counted("inner"))),
    "node hook": hooked(hook_node),
    "tensor hook": do(lambda u, y, v: _hooked(y)),
    "global hook": hooked(lambda u: nn.modules.module.register_module_forward_hook(counted("all"))),
}
FEATURES: dict[str, Feature] = {**COMPUTE, **STATE, **ARGUMENTS, **RESULTS, **HOOKS}
HARD = (
    "from a list, backward inside, gradient inside, nested backward, nested backward beside, "
    "local class read, saved elsewhere, read on the host, rows by mask, whole and part written, "
    "own generator, seed inside, checkpointed dropout, fork rng, python random, numpy random, "
    "reentrant checkpoint, input written, input data written, hidden module, weight written, "
    "frozen weight written, buffer replaced, attribute replaced, list attribute filled, dict "
    "attribute filled, list attribute read, dict attribute read, object read, class attribute "
    "read, global read, global filled, closure read, counter, default read, default filled, "
    "counter in backward, iterator, drawn by an object, call count, warmup by the loop, dataclass "
    "given, argument written, view of a used tensor, view of the input "
    "returned, views of one, list filled, dict filled, sparse, tagged, subclass, hook inside, "
    "backward hook inside, node hook, tensor hook, hook with state, global hook, other module "
    "read, other module by weak reference, option asked for, class asked, fields of an object, "
    "method of a class, global class, environment, user's dict, dict of attributes, array of one "
    "number, leaf asked, node asked, gradient of a weight read, attribute of a weight, attribute "
    "of a result, counter of another module, iterator in a list"
).split(", ")
