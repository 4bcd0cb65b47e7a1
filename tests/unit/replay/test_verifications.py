"""Units that are verified in turn: which comes when, what is found, and that ranks agree."""

from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_cg.replay import guarded_graph as graphed
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.mismatch_policy import Counters, MismatchPolicy, ReplayPolicy
from tests.unit.ranks import on_ranks
from tests.unit.replay.test_eager_passes import UNIT, WRONG, with_collectives
from tests.unit.units import plain

TURN, ROUND, UNITS = 10, 300, 3
PAUSE = 15
"""Steps in which no unit replays."""
ORDERS = ([0, 1, 2], [0, 2], [0, 1], [0, 1, 1, 2])


@pytest.mark.parametrize("units", [1, 3, 20, 48])
def test_each_unit_is_verified_soon_and_then_not_too_often(units: int) -> None:
    policy = ReplayPolicy("eager", None)
    verifications = MismatchPolicy(policy, Counters(), units=units).verifications
    steps: dict[int, list[int]] = {index: [] for index in range(units)}
    for step in range(1, 5001):
        verifications.begin_step()
        for index in [*verifications.due] if step % 50 >= PAUSE else ():
            verifications.ended(index, None, gradients=True)
            steps[index].append(step)
    assert max(first for first, *_ in steps.values()) <= TURN * units + PAUSE
    gaps = [b - a for each in steps.values() for a, b in pairwise(each)]
    assert max(gaps) <= max(ROUND, TURN * units) + PAUSE
    assert sum(map(len, steps.values())) <= units * (5000 / ROUND + 5)


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_every_so_many_steps_all_are_verified(interval: int) -> None:
    policy = ReplayPolicy("eager", interval)
    verifications = MismatchPolicy(policy, Counters(), units=2).verifications
    for step in range(1, 8):
        verifications.begin_step()
        verifications.ended(0, None, gradients=True)  # The first of several replays.
        assert len(verifications.due) == 2 * (interval > 0 and step % interval == 0)


@pytest.mark.parametrize(
    ("direction", "tensors", "number", "name"),
    [
        ("forward", "outputs", 0, "output 0"),
        ("backward", "grad_inputs", 0, "the gradient of input 0"),
        ("backward", "grad_inputs", -1, "the gradient of linear.bias"),
    ],
)
def test_a_later_fault_is_found_when_its_unit_is_verified(
    direction: str, tensors: str, number: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def flip(tensor: torch.Tensor) -> None:
        tensor.detach().view(-1).view(torch.int32)[3] ^= 1

    training, last = plain.Training(), plain.UNITS * TURN
    with training.graphs() as graphs:
        for step in range(plain.WARMUP + last):
            with graphs.step():
                if step == plain.WARMUP + 1:
                    recorded: Any = training.model[1].cuda_graphs[0].graph._recorded
                    wrong = partial(flip, getattr(recorded, tensors)[number])
                    getattr(recorded, direction).entries.append(wrong)
                training.microbatch(training, torch.randn(plain.ROWS, plain.WIDTH))
        assert graphs.counters.mismatched == graphs.counters.eager == 1
        assert graphs.counters.verified == plain.UNITS and graphs.counters.outputs_only == 0
    assert f": {name}, replayed" in caplog.text and "different in 1 of" in caplog.text
    assert f"compared in step 1 with graphs, {last - 1} steps ago" in caplog.text


def life(eager: Any, run: Any, wrong: str = "") -> dict[str, Any]:
    """Train beside an eager run, in random orders of units: what was verified, and refuted when."""
    done, chance, refuted = list[tuple[int, str]](), Random(7), 0
    real = cast(Any, graphed).verify

    def verify(unit: Any, *arguments: Any, **options: Any) -> Mismatch | None:
        assert real(unit, *arguments, **options) is None
        done.append((step, unit.name))
        # On one rank alone, though it is right.
        is_wrong = unit.name == wrong and step > 1 and dist.get_rank() == 1
        return WRONG if options["on_any_rank"](is_wrong) else None

    run.with_graphs()
    for step in range(2 * UNITS * TURN + 2):
        order, losses = None if wrong or step < 2 else chance.choice(ORDERS), []
        with patch.object(graphed, "verify", verify):
            for one in (eager, run):
                torch.manual_seed(step)
                one.network.order = order
                losses.append(one.step())
        assert torch.equal(*losses), step
        if step and not refuted:
            refuted = step * bool(run.graphs.session.mismatches.verifications.refuted)
    counters = run.graphs.counters
    assert counters.verified == len(done) - UNITS and counters.outputs_only == 0
    run.graphs.close()
    return {"done": done, "refuted": refuted, "eager": counters.eager}


def on_two_ranks() -> list[dict[str, Any]]:
    from tests.unit.units.sharded import Case, Run, under_fsdp2

    case = Case(under_fsdp2())
    return [
        life(Run(case), Run(case)),
        life(Run(case), Run(case), UNIT),
        life(with_collectives(), with_collectives(), UNIT),
    ]


def test_ranks_verify_the_same_units_and_refute_the_same_graphs() -> None:
    one, two = on_ranks(on_two_ranks)
    assert [life["done"] for life in one] == [life["done"] for life in two]
    assert {name for _, name in one[0]["done"][UNITS:]} == {f"layers.{n}" for n in range(UNITS)}
    # Without collectives, the other rank hears of it when the next verification is due.
    assert [life["refuted"] for life in two] == [0, 2 * TURN, 2 * TURN]
    assert [life["refuted"] for life in one] == [0, 3 * TURN, 2 * TURN]
    assert all(life["eager"] for life in (*one, *two))
