"""Tensors without one block of memory, sparse and nested ones, where a unit may meet them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import CaptureError, ConfigurationError
from megatron_cg.replay.mismatch_policy import Counters
from tests.unit.counted import expect
from tests.unit.units.plain import ROWS, STEPS, WARMUP, WIDTH, Training, Unit, backward

Reads = Callable[[Any, torch.Tensor, Any], Any]
"""What a unit returns, of itself, its output and its second argument."""


class Reading(Unit):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.reads, self.kept = reads, coo()

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        return self.reads(self, super().forward(x), other)


def trained(reads: Reads, *others: Any) -> Counters:
    """Train a unit, which gets the next of ``others`` in each step, or the last one."""

    def microbatch(run: Training, x: torch.Tensor) -> torch.Tensor:
        out = run.model[0](x, others[min(run.step, len(others) - 1)])
        return backward((out[0] if isinstance(out, tuple) else out).square().mean())

    training = Training(lambda: nn.ModuleList([Reading(reads)]), microbatch)
    training.optimizer = torch.optim.SGD(training.model[0].linear.parameters())
    with training.graphs() as graphs:
        for _ in training.run(graphs):
            pass
        return graphs.counters


def coo() -> torch.Tensor:
    return torch.eye(ROWS, WIDTH).to_sparse()


NOT_DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": coo,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_an_argument_that_is_not_dense_is_refused_by_name(kind: str) -> None:
    words = rf"unit 0: argument other\[0\] is a {kind} tensor .* indices"
    with pytest.raises(ConfigurationError, match=words):
        trained(lambda unit, y, other: y, [NOT_DENSE[kind]()])


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_call_with_such_a_tensor_in_place_of_a_dense_one_runs_eagerly(kind: str) -> None:
    dense = torch.ones(1, WIDTH).expand(ROWS, WIDTH)
    others = (dense, dense, NOT_DENSE[kind](), dense)
    replayed = STEPS - WARMUP - 1
    expect(trained(lambda unit, y, other: y, *others), replayed=replayed, mismatched=1)


REFUSED: dict[str, tuple[Reads, str]] = {
    "a tensor of the unit": (
        lambda unit, y, other: y * unit.kept.to_dense(),
        r"captured as forward of 0 \(Reading\).* not dense \(.*outside",
    ),
    "a tensor of the pass": (
        lambda unit, y, other: y + y.detach().to_sparse().to_dense(),
        r"^aten\._?to_sparse\S* in .*0 \(Reading\).* not dense",
    ),
    "an output": (
        lambda unit, y, other: (y, y.detach().to_sparse()),
        r"^0 \(Reading\) returned a tensor that .* dense .*Leave",
    ),
    "a gradient": (
        lambda unit, y, other: y + unit.table(other),
        r"^0 \(Reading\): the gradient of table.weight is sparse.*sparse=False",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_dense_inside_of_a_unit_is_refused(what: str) -> None:
    reads, words = REFUSED[what]
    with pytest.raises(CaptureError, match=words):
        trained(reads, torch.arange(ROWS))
