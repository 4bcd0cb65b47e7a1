"""The comparison of one step finds wrong outputs, gradients and buffers, and changes nothing."""

from __future__ import annotations

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


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return torch.zeros_like(grad)


@pytest.fixture
def region() -> Region:
    torch.manual_seed(1)
    return Region(Block(), (torch.randn(2, 4, requires_grad=True),), {"scale": 2.0})


def right(module: Any, given: torch.Tensor, scale: float) -> Any:
    return module(given, scale)


def off_by_a_bit(module: Any, given: torch.Tensor, scale: float) -> Any:
    out, _ = module(given, scale)
    return out + torch.finfo(out.dtype).eps * out.detach(), None


def zero_gradient(module: Any, given: torch.Tensor, scale: float) -> Any:
    out, _ = module(given, scale)
    wrong: Any = WrongGradient.apply
    return wrong(out), None


def detached_input(module: Any, given: torch.Tensor, scale: float) -> Any:
    return module(given.detach(), scale)


def counted_twice(module: Any, given: torch.Tensor, scale: float) -> Any:
    module.count += 1
    return module(given, scale)


def one_more(module: Any, given: torch.Tensor, scale: float) -> Any:
    out, _ = module(given, scale)
    return out, out


def another_dtype(module: Any, given: torch.Tensor, scale: float) -> Any:
    return module(given, scale)[0].double()


@pytest.mark.parametrize(
    ("compiled", "text"),
    [
        (
            off_by_a_bit,
            "output 0 is torch.float32 of shape (2, 4) in eager and different in 8 of 32 bytes",
        ),
        (zero_gradient, "the gradient of parameter.linear.weight is torch.float32 of shape (4, 4)"),
        (detached_input, "the gradient of argument.0 is torch.float32 of shape (2, 4) in eager"),
        (
            counted_twice,
            "buffer count is torch.float32 of shape () in eager and different in 2 of 4 bytes",
        ),
        (one_more, "results in eager and"),
        (another_dtype, "in eager and torch.float64 of shape (2, 4) in compiled code"),
    ],
)
def test_what_differs_is_named(compiled: Any, text: str, region: Region) -> None:
    assert text in (first_difference(region, compiled) or "nothing")


def test_equal_code_changes_nothing(region: Region) -> None:
    ran: list[int] = []
    region.module.linear.weight.register_post_accumulate_grad_hook(lambda _: ran.append(1))  # type: ignore[union-attr, operator]
    assert first_difference(region, right) is None
    assert int(region.module.count) == 0  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in region.module.parameters()) and not ran
    assert region.args[0].grad is None


def test_outputs_that_are_all_zero_show_nothing(region: Region) -> None:
    with torch.no_grad():
        region.module.get_parameter("linear.bias").zero_()
    empty = Region(region.module, (torch.zeros(2, 4, requires_grad=True),), region.kwargs)
    ran = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return right(*args, **kwargs)

    said = first_difference(empty, compiled)
    assert said is not None and said.startswith("every output is zero")
    assert ran  # Ranks whose outputs are not zero wait for the collectives of both passes.


class WritesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(given)
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
