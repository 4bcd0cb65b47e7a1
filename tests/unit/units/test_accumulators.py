"""Accumulators that an old graph of autograd holds on to, and new ones."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import CaptureError
from megatron_cg.replay.unit import ReplayFunction
from megatron_cg.units.unsharded import OtherLeaves


def accumulator(parameter: nn.Parameter) -> Any:
    node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


class Special(nn.Parameter):
    """A parameter of another class."""


class Shared(nn.Module):
    """A weight of its own under two names, which it may use in another way, and a frozen one."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.weight = self.same = Special(torch.full((3,), 2.0))
        self.frozen = nn.Parameter(torch.full((3,), 3.0), requires_grad=False)
        self.kept, self.way = [self.weight], way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "moves":
            self.weight.data = self.weight.data.clone()
        first = self.kept[0] if self.way == "not by attribute" else self.weight
        return x * first * self.same * self.frozen


def run_on_leaves(model: Shared) -> tuple[OtherLeaves, list[nn.Parameter]]:
    leaves = OtherLeaves([model])
    with leaves.held():
        held = [model.weight, model.same, model.frozen]
        model(torch.ones(3)).sum().backward()
    return leaves, held


def test_passes_on_other_leaves_reach_no_accumulator_of_a_parameter() -> None:
    model = Shared()
    vars(model.weight)["partition"] = "columns"
    reached: list[Any] = []
    node = accumulator(model.weight)
    node.register_hook(lambda *_: reached.append(node))
    _, (weight, same, frozen) = run_on_leaves(model)
    assert weight is same and weight is not model.weight and frozen is model.frozen
    assert type(weight) is Special and weight.requires_grad
    assert vars(weight)["partition"] == "columns" and weight.data_ptr() == model.weight.data_ptr()
    assert weight.grad is not None and weight.grad.tolist() == [12.0] * 3
    assert model.weight.grad is None and not reached
    assert model.weight is model.same and model._parameters["weight"] is model.kept[0]
    assert not model.weight._backward_hooks


def test_a_replay_gives_its_gradients_to_the_parameters_but_for_verification() -> None:
    model = Shared()
    leaves, (leaf, *_) = run_on_leaves(model)
    given: list[Any] = []
    function: Any = SimpleNamespace(apply=lambda *args: given.append(args), forward=0, backward=0)
    replaced: Any = []
    leaves.replays(ReplayFunction(function, 1, replaced.append, lambda: lambda: None, ()))
    leaf.grad = None
    replaced[0].apply("input", leaf, model.frozen)
    model.weight.requires_grad_(False)  # frozen since the capture
    with leaves.held(captures=False):
        assert model.weight is leaf
        replaced[0].apply("input", leaf, model.frozen)
    outside, inside = given
    assert outside[1] is model.weight and inside[1] is leaf
    assert outside[2] is inside[2] is model.frozen


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("not by attribute", r"Shared\.weight is used through another reference"),
        ("moves", "Shared moves weight to other memory"),
    ],
)
def test_what_the_leaves_cannot_stand_for_is_refused(way: str, words: str) -> None:
    model = Shared(way)
    with pytest.raises(CaptureError, match=words):
        run_on_leaves(model)
    assert model.weight is model.kept[0] and not model.weight._backward_hooks
