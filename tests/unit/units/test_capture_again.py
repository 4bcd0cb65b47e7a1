"""Units are captured again after a change that lasts, by another call of graph_units."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.replay.mismatch_policy import Counters
from tests.unit.counted import expect
from tests.unit.ranks import on_ranks
from tests.unit.units import plain
from tests.unit.units.plain import UNITS, WARMUP, WIDTH, Training, Unit, same, units
from tests.unit.units.sharded import MICROBATCHES, Case, Run, equal

STEPS, EVERY, CHANGE = 16, 2, 5
"""The first capture comes in step 2, and the change in the fourth step with graphs."""


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


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "STEPS", STEPS)


class Again:
    """The graphs of a run, which :meth:`renew` captures again."""

    def __init__(self, run: Training) -> None:
        self._run, self.graphs = run, run.graphs()

    def step(self) -> Any:
        return self.graphs.step()

    def renew(self) -> Counters:
        """Returns the counters of the graphs before."""
        self.graphs.close()
        before, self.graphs = self.graphs, self._run.graphs()
        return before.counters


def once(change: Callable[[Training], object]) -> Callable[[Training], object]:
    return lambda run: change(run) if run.step == CHANGE else None


CHANGES = {unfreeze: 1, set_schedule: 1, in_double: 2}
"""And how many units have a mismatch then."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_lasts_is_captured_by_another_call(
    change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first: list[Counters] = []

    def before(run: Training) -> None:
        once(change)(run)
        if run.step == CHANGE + EVERY:
            first.append(again.renew())

    eager = Training(partial(units, Growing), before=once(change))
    graphed = Training(partial(units, Growing), before=before)
    again: Any = Again(graphed)
    assert same(list(eager.run()), graphed.run(again))
    without = EVERY * CHANGES[change]
    expect(first[0], captured=UNITS, mismatched=without)
    replayed = (STEPS - CHANGE - EVERY - WARMUP) * UNITS
    expect(again.graphs.counters, captured=UNITS, mismatched=0, replayed=replayed)
    again.graphs.close()
    assert "graphs.close(), and then graphs = graph_units(model, units)" in caplog.text


def freeze_on_one_rank(run: Run, step: int) -> None:
    if step == 1 and dist.get_rank() == 1:
        run.network.layers[0].get_parameter("scale").requires_grad_(False)


@contextmanager
def together(_model: Any, _last: bool) -> Iterator[None]:
    """A loop has collectives of its own."""
    dist.barrier()
    yield


def run_frozen() -> tuple[bool, Any]:
    case = Case(lambda network: network, before_step=freeze_on_one_rank, microbatch=together)
    plain, graphed = Run(case), Run(case)
    plain.train(10)
    graphed.train(10, graphed=True)
    assert graphed.graphs is not None
    return equal(plain, graphed), graphed.graphs.counters.as_dict()


def test_all_ranks_observe_another_step_if_a_weight_was_frozen_on_one() -> None:
    for is_equal, counters in on_ranks(run_frozen):
        assert is_equal and counters["replayed"] == 8 * 3 * MICROBATCHES, counters
