"""The comparison of one step finds wrong outputs, gradients and buffers, and changes nothing."""

from typing import Any

import pytest
import torch

from megatron_cg.compiled.load import first_difference
from megatron_cg.compiled.region import Region


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, given: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, None]:
        self.count += 1
        return self.linear(given) * scale, None


@pytest.fixture
def region() -> Region:
    torch.manual_seed(1)
    return Region(Block(), (torch.randn(2, 4, requires_grad=True),), {"scale": 2.0})


def wrong_gradient(module: Any, given: torch.Tensor, scale: float) -> Any:
    out = module(given, scale)[0]
    out.register_hook(torch.zeros_like)
    return out, None


def counted_twice(module: Any, given: torch.Tensor, scale: float) -> Any:
    module.count += 1
    return module(given, scale)


@pytest.mark.parametrize(
    ("compiled", "text"),
    [
        (
            lambda m, x, scale: (m(x, scale)[0] * (1 + torch.finfo(x.dtype).eps), None),
            "output 0 is torch.float32 of shape (2, 4) in eager and different in 8 of 32 bytes",
        ),
        (
            wrong_gradient,
            "the gradient of parameter.linear.weight is torch.float32 of shape (4, 4)",
        ),
        (
            lambda m, x, scale: m(x.detach(), scale),
            "the gradient of argument.0 is torch.float32 of shape (2, 4) in eager",
        ),
        (
            counted_twice,
            "buffer count is torch.float32 of shape () in eager and different in 2 of 4 bytes",
        ),
        (lambda m, x, scale: m(x, scale)[:1] * 2, "results in eager and"),
        (
            lambda m, x, scale: m(x, scale)[0].double(),
            "in eager and torch.float64 of shape (2, 4) in compiled code",
        ),
    ],
    ids=["output", "weight's gradient", "input's gradient", "buffer", "count", "dtype"],
)
def test_what_differs_is_named(compiled: Any, text: str, region: Region) -> None:
    assert text in (first_difference(region, compiled) or "nothing")


def test_equal_code_changes_nothing(region: Region) -> None:
    ran: list[int] = []
    weight: Any = region.module.get_parameter("linear.weight")
    weight.register_post_accumulate_grad_hook(lambda _: ran.append(1))
    assert first_difference(region, Block.__call__) is None
    assert int(region.module.get_buffer("count")) == 0
    assert all(parameter.grad is None for parameter in region.module.parameters()) and not ran
    assert region.args[0].grad is None


def test_outputs_that_are_all_zero_show_nothing(region: Region) -> None:
    with torch.no_grad():
        region.module.get_parameter("linear.bias").zero_()
    empty = Region(region.module, (torch.zeros(2, 4, requires_grad=True),), region.kwargs)
    ran = []

    def compiled(module: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return module(*args, **kwargs)

    said = first_difference(empty, compiled)
    assert said is not None and said.startswith("every output is zero")
    assert ran  # Ranks whose outputs are not zero wait for the collectives of both passes.


class WritesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        out = given.clone()
        out.copy_(given * 2)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


class Doubles(torch.nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        apply: Any = WritesItsOutput.apply
        doubled: torch.Tensor = apply(super().forward(given))
        return doubled


def test_gradients_that_torch_loses_are_named() -> None:
    """torch 2.11 traces such a Function with zero gradients (pytorch/pytorch#180642)."""
    torch._dynamo.reset()
    region = Region(Doubles(4, 4), (torch.randn(2, 4, requires_grad=True),))
    compiled = torch.compile(Doubles.forward, backend="aot_eager", fullgraph=True)
    said = first_difference(region, compiled)
    if torch.__version__.startswith("2.11."):
        assert said is not None and said.startswith("the gradient of parameter.weight is")
    else:
        assert said is None
