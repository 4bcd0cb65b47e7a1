"""One forward and backward pass of compiled code beside eager, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from megatron_cg.compiled.region import Region
from megatron_cg.replay.verify import difference, synthetic_gradient

_Named = list[tuple[str, torch.Tensor | None]]


def first_difference(region: Region, compiled: Callable[..., Any]) -> str | None:
    """The first output, buffer or gradient that differs between eager and compiled, in words.

    Outputs that are all zero are named as well, since equal zeros say nothing about the code.

    Both passes run on the region's own arguments. Buffers are put back; gradients of parameters
    are not accumulated, and hooks of parameters do not run. All ranks of the region's groups call
    this together, since both passes contain its collectives.
    """
    eager = _pass(region, region.module)
    found = _pass(region, lambda *args, **kwargs: compiled(region.module, *args, **kwargs))
    outputs = [value for name, value in eager if name.startswith("output ")]
    if outputs and not any(one is not None and one.any() for one in outputs):
        return (
            "every output is zero, so the comparison shows nothing: give the region arguments and "
            "weights with realistic values"
        )
    if [name for name, _value in eager] != [name for name, _value in found]:
        return f"{len(eager)} results in eager and {len(found)} in compiled code"
    for (name, one), (_, other) in zip(eager, found, strict=True):
        different = difference(one, other)
        if different is not None:
            return f"{name} is {different[0]} in eager and {different[1]} in compiled code"
    return None


def _pass(region: Region, run: Callable[..., Any]) -> _Named:
    buffers = dict(region.module.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    args, kwargs = tree_map(_detached, (region.args, dict(region.kwargs)))
    inputs = [
        (f"the gradient of {name}", value)
        for name, value in Region(region.module, args, kwargs).tensors()
        if value.requires_grad
    ]
    try:
        made = [one for one in tree_leaves(run(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        results: _Named = [(f"output {place}", one.detach()) for place, one in enumerate(made)]
        results += [(f"buffer {name}", buffer.clone()) for name, buffer in buffers.items()]
        ends = [one for one in made if one.requires_grad]
        if ends and inputs:
            names, leaves = zip(*inputs, strict=True)
            starts = [synthetic_gradient(one) for one in ends]
            gradients = torch.autograd.grad(ends, leaves, starts, allow_unused=True)
            results += list(zip(names, gradients, strict=True))
        return results
    finally:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(before[name])


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
