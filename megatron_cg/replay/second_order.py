"""Gradients of a replay cannot be differentiated again: a graph computes numbers alone.

``create_graph=True`` asks for gradients with a graph of autograd of their own. A replay has none:
without this file, what depends on its gradients would miss a part, and autograd would not say so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.unit import Unit


class _Once(torch.autograd.Function):
    """Passes gradients on, as results that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, _needs: torch.Tensor, *gradients: torch.Tensor) -> Any:
        ctx.unit = unit
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor | None) -> Any:
        unit: Unit = ctx.unit
        raise ReplayMismatchError(
            f"{unit.name}: the gradients of its replay are differentiated again, as after "
            "backward(create_graph=True) or torch.autograd.grad(..., create_graph=True), and a "
            f"graph has no second derivative. {unit.leave_out(None)}"
        )


def refuse_second_derivatives(node: Any, unit: Unit) -> None:
    """Make a use of the gradients that ``node`` is about to return an error.

    Args:
        node: the node of a replay of ``unit``, in a backward pass with ``create_graph=True``.
        unit: the unit.
    """
    node.register_hook(partial(_as_last, unit))


def _as_last(unit: Unit, gradients: tuple[torch.Tensor | None, ...], _incoming: Any) -> Any:
    given = [gradient for gradient in gradients if gradient is not None]
    needs = torch.zeros((), device="cpu", requires_grad=True)
    passed = iter(_Once.apply(unit, needs, *given) if given else ())  # type: ignore[no-untyped-call]
    return tuple(None if gradient is None else next(passed) for gradient in gradients)
