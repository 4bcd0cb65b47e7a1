"""Tensors without one block of memory: sparse, nested, quantized and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg import graph_units
from megatron_cg.errors import CaptureError, ConfigurationError
from tests.unit.counted import expect

WIDTH, WARMUP, STEPS = 4, 2, 4


class Unit(nn.Module):
    """Reads ``other``, which is anything that can be made dense."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        other = other[0] if isinstance(other, list) else other
        y = torch.tanh(self.linear(x))
        if isinstance(other, torch.Tensor):
            y = y * other.to_dense() if other.layout is not torch.strided else y * other.sum()
        return x + y


def train(
    unit: Unit, *args: Any, taken: Callable[[Any], torch.Tensor] = lambda out: out, **options: Any
) -> Any:
    """Steps of one unit; returns the counters."""
    layers = nn.ModuleList([unit])
    with graph_units(layers, "*", backend="tape", warmup_steps=WARMUP, **options) as graphs:
        for number in range(STEPS):
            with graphs.step():
                values = [one[number] if isinstance(one, tuple) else one for one in args]
                taken(layers[0](torch.ones(WIDTH, WIDTH), *values)).square().mean().backward()
        return graphs.counters


def coo() -> torch.Tensor:
    return torch.eye(WIDTH).to_sparse()


NOT_DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": coo,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


class Ignoring(Unit):
    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        return super().forward(x)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_an_argument_that_is_not_dense_is_refused_by_name(kind: str, inside: bool) -> None:
    made = NOT_DENSE[kind]()
    words = rf"unit 0: argument other{r'\[0\]' if inside else ''} is a {kind} tensor .* indices"
    with pytest.raises(ConfigurationError, match=words):
        train(Ignoring(), [made] if inside else made)


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_call_with_such_a_tensor_in_place_of_a_dense_one_runs_eagerly(
    kind: str, expanded: bool
) -> None:
    dense = torch.ones(1, WIDTH).expand(WIDTH, WIDTH) if expanded else torch.ones(WIDTH, WIDTH)
    calls = (dense, dense, NOT_DENSE[kind](), dense)
    expect(train(Ignoring(), calls), replayed=1, mismatched=1)


def test_a_tensor_of_the_unit_that_is_not_dense_is_refused_if_it_is_read() -> None:
    class Keeps(Unit):
        def forward(self, x: torch.Tensor, other: Any = None) -> Any:
            return super().forward(x, self.kept if other is None else None)

    unit = Keeps()
    unit.kept = coo()
    expect(train(unit, 1), replayed=STEPS - WARMUP)
    with pytest.raises(
        CaptureError, match=r"captured as forward of 0 \(Keeps\).* not dense \(.*outside"
    ):
        train(unit)


def test_a_sparse_tensor_of_the_pass_itself_is_refused_by_its_operation() -> None:
    class Makes(Unit):
        def forward(self, x: torch.Tensor, other: Any = None) -> Any:
            return super().forward(x) + x.detach().to_sparse().to_dense()

    with pytest.raises(CaptureError, match=r"^aten\._?to_sparse\S* in .*0 \(Makes\).* not dense"):
        train(Makes())


def test_a_sparse_output_is_refused() -> None:
    class Sparse(Unit):
        def forward(self, x: torch.Tensor, other: Any = None) -> Any:
            return super().forward(x), x.detach().to_sparse()

    with pytest.raises(
        CaptureError, match=r"^0 \(Sparse\) returned a tensor that .* dense .*Leave"
    ):
        train(Sparse(), taken=lambda out: out[0])


def test_a_sparse_gradient_is_refused_with_its_parameter() -> None:
    class Embeds(Unit):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)

        def forward(self, x: torch.Tensor, other: Any = None) -> Any:
            return super().forward(x) + self.table(other)

    with pytest.raises(
        CaptureError, match=r"^0 \(Embeds\): the gradient of table.weight is sparse.*sparse=False"
    ):
        train(Embeds(), torch.arange(WIDTH))
