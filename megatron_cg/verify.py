"""A replay beside an eager pass on the same inputs, compared bit for bit.

Note [Outside of training]
    Both passes run on detached inputs, and everything that they change is put back: random
    generators, FP8 scales, buffers, MoE metrics, FSDP's states. The replay that training uses is
    a third pass. So a run that verifies trains the very numbers of one that does not. The eager
    pass has autograd on, as in training: without it some kernels round differently (seen with the
    attention of TE 2.20.2 behind query and key norms).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from megatron_cg.capture import Unit
from megatron_cg.guard.mismatch import Mismatch

Kept = Callable[[], AbstractContextManager[None]]


def verify(
    unit: Unit,
    graph: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kept: Kept,
) -> Mismatch | None:
    """The first output in which a replay differs from an eager pass, or None.

    Waits for the GPU, once an output.

    Args:
        unit: whose part is run eagerly.
        graph: its graph.
        args: what it is called with; never written to.
        kwargs: the same by keyword.
        kept: makes a context that puts back what a pass changes.
    """
    with kept():
        eager = _copies(unit.run(unit.layer, *_detached(args, kwargs)))
    with torch.no_grad(), kept():
        inputs, keywords = _detached(args, kwargs)
        return _first_difference(eager, _copies(graph(*inputs, **keywords)))


def _detached(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    def detach(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.requires_grad)

    return tree_map(detach, list(args)), tree_map(detach, dict(kwargs))


def _copies(outputs: Any) -> list[torch.Tensor | None]:
    """Copies without autograd, which outlive what ``kept`` puts back and the next replay."""
    flat, _ = tree_flatten(outputs)
    return [None if tensor is None else tensor.detach().clone() for tensor in flat]


def _first_difference(
    eager: Sequence[torch.Tensor | None], replayed: Sequence[torch.Tensor | None]
) -> Mismatch | None:
    if len(eager) != len(replayed):
        return _mismatch("the number of outputs", str(len(eager)), str(len(replayed)))
    for index, (one, two) in enumerate(zip(eager, replayed, strict=True)):
        if one is None or two is None:
            if one is not two:
                return _mismatch(f"output {index}", _kind(one), _kind(two))
        elif one.shape != two.shape or one.dtype != two.dtype:
            return _mismatch(f"output {index}", _kind(one), _kind(two))
        elif not torch.equal(_bytes(one), _bytes(two)):
            different = int((_bytes(one) != _bytes(two)).sum())
            text = f"different in {different} of {one.nbytes} bytes"
            return _mismatch(f"output {index}", _kind(one), text)
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of it: NaN is equal to NaN here, and 0.0 is not -0.0."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _mismatch(subject: str, expected: str, actual: str) -> Mismatch:
    return Mismatch(
        "verification",
        f"{subject}, replayed beside an eager pass on the same inputs,",
        expected,
        actual,
        "The graph computes something else than the layer, though no guard saw a reason: please "
        "report it, with this line. Until then leave the layer out with --cg-layers.",
    )
