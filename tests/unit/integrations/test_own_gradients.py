"""Which gradients of a replay's inputs are copied: those that somebody ahead may keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_cg.integrations.own_gradients import own_gradient

Made = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a replay's output and a leaf."""


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class SomebodysOwn(Replay):
    """A function that may keep its gradient."""


class OfMegatron(Replay):
    """A function that passes its gradient on."""


class OfTransformerEngine(Replay):
    """A function that computes the gradients that it passes on."""


OfMegatron.__module__ = "megatron.core.tensor_parallel.mappings"
OfTransformerEngine.__module__ = "transformer_engine.pytorch.module.linear"


def applied(function: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return function.apply  # type: ignore[no-any-return]


of_megatron, of_te = applied(OfMegatron), applied(OfTransformerEngine)
WEIGHT = torch.ones(4, 4, requires_grad=True)


def views(tensor: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        tensor = tensor.view(tensor.shape)
    return tensor


def retained(tensor: torch.Tensor) -> torch.Tensor:
    tensor.retain_grad()
    return tensor


def hooked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.register_hook(lambda gradient: None)
    return tensor


COPIED: dict[str, Made] = {
    "a leaf": lambda _, leaf: leaf,
    "a view of a leaf": lambda _, leaf: leaf.view(-1),
    "a leaf beside a replay": lambda replay, leaf: replay + leaf,
    "a leaf before a replay": lambda replay, leaf: torch.cat([leaf, replay]),
    "a leaf before a product": lambda _, leaf: torch.cat([leaf, leaf @ WEIGHT]),
    "a bias": lambda replay, leaf: functional.linear(replay, WEIGHT, leaf[0]),
    "an unknown function": lambda replay, _: applied(SomebodysOwn)(replay),
    "a checkpoint": lambda replay, _: checkpoint(lambda x: x + WEIGHT, replay, use_reentrant=True),
    "a function of Megatron's": lambda _, leaf: of_megatron(leaf),
    "further than is looked": lambda replay, _: views(replay),
    "a retained gradient": lambda replay, _: retained(replay),
    "a hook on the gradient": lambda replay, _: hooked(replay),
}
NOT_COPIED: dict[str, Made] = {
    "a replay": lambda replay, _: replay,
    "a view of a replay": lambda replay, _: of_megatron(replay.view(-1)),
    "a sum of a replay": lambda replay, leaf: replay + leaf @ WEIGHT,
    "an embedding": lambda _, leaf: functional.embedding(torch.tensor([0, 1]), leaf).transpose(
        0, 1
    ),
    "a linear layer": lambda _, leaf: of_te(leaf).view(-1),
    "nothing to train": lambda _, leaf: leaf.detach(),
}


def asked(make: Made) -> bool:
    """Whether the input that is made gets a copy of its gradient."""
    replay = applied(Replay)(torch.ones(4, 4, requires_grad=True))
    node = replay.grad_fn
    value = make(replay, torch.ones(4, 4, requires_grad=True))
    return own_gradient(value, lambda one: one is node) is not value


@pytest.mark.parametrize("case", COPIED)
def test_a_gradient_that_may_be_kept_is_copied(case: str) -> None:
    assert asked(COPIED[case])


@pytest.mark.parametrize("case", NOT_COPIED)
def test_a_gradient_that_nobody_keeps_costs_nothing(case: str) -> None:
    assert not asked(NOT_COPIED[case])


def test_a_copy_has_its_own_memory() -> None:
    leaf = torch.ones(3, requires_grad=True)
    memory = torch.full((3,), 2.0)
    own_gradient(leaf, lambda _: False).backward(memory)
    memory.zero_()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3
