"""Units are captured again after a change that lasts: graphs are closed, and others are made."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.counted import expect
from tests.unit.ranks import on_ranks
from tests.unit.units import plain
from tests.unit.units.plain import REPLAYED, UNITS, WIDTH, Training, Unit, same, units
from tests.unit.units.sharded import MICROBATCHES, STEPS, WARMUP, Case, Run, equal
from tests.unit.units.test_sharded import WRAPS


class Growing(Unit):
    """Has a scale and, frozen at first, a second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.second = 1.0, nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * self.scale + self.second(x)
        return out


def unfreeze(run: Training) -> None:
    run.model[0].second.requires_grad_(True)
    run.optimizer.add_param_group({"params": run.model[0].second.parameters()})


def set_schedule(run: Training) -> None:
    run.model[0].scale = 0.5


def in_double(run: Training) -> None:
    run.optimizer = torch.optim.AdamW(run.model.double().parameters(), lr=0.1)
    run.microbatch = lambda run, x: plain.train(run, x.double())


@pytest.mark.parametrize("change", [unfreeze, set_schedule, in_double])
def test_graphs_after_a_change(change: Any) -> None:
    eager, graphed = (Training(partial(units, Growing)) for _ in range(2))
    expected = [*eager.run()]
    with graphed.graphs() as graphs:
        assert same(expected, graphed.run(graphs))
    change(eager)
    change(graphed)
    expected = [*eager.run()]
    with graphed.graphs() as graphs:
        assert same(expected, graphed.run(graphs))
    expect(graphs.counters, captured=UNITS, replayed=REPLAYED)


def freeze_on_one_rank(run: Run, step: int) -> None:
    if step == 1 and dist.get_rank() == 1:
        run.network.layers[0].get_parameter("scale").requires_grad_(False)


@contextmanager
def together(_model: Any, _last: bool) -> Iterator[None]:
    """A loop has collectives of its own."""
    dist.barrier()
    yield


def run_each() -> dict[str, Any]:
    """By way of sharding, whether a run equals an eager one, and the replays of its graphs."""
    found = {}
    frozen: Any = {"before_step": freeze_on_one_rank, "microbatch": together}
    cases = {way: Case(wrap) for way, wrap in WRAPS.items()}
    for way, case in (cases | {"none": Case(lambda network: network, **frozen)}).items():
        plain, graphed, replayed = Run(case), Run(case), list[int]()
        for _ in range(2):
            plain.train()
            graphed.train(graphed=True)
            assert graphed.graphs is not None
            replayed.append(graphed.graphs.counters.replayed)
        found[way] = equal(plain, graphed), replayed
    return found


def test_all_ranks_capture_again() -> None:
    """With no sharding a weight is frozen in step 1 on one rank: all observe that step too."""
    passes = 3 * MICROBATCHES
    usual = passes * (STEPS - WARMUP)
    for found in on_ranks(run_each):
        for way, (is_equal, replayed) in found.items():
            first = usual - passes * (way == "none")
            assert is_equal and replayed == [first, usual], way
