"""What a call of a unit does, what is said, and which unit is verified when, on all ranks."""

from functools import partial
from itertools import count, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron_cg.errors import ReplayMismatchError, Voice
from megatron_cg.integrations.call_arguments import UNITS, CallVoice
from megatron_cg.replay import mismatch_policy
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guarded_graph import replay_instead
from megatron_cg.replay.mismatch_policy import Counters, MismatchPolicy, ReplayPolicy
from megatron_cg.replay.unit import Unit
from tests.unit.ranks import on_ranks
from tests.unit.replay.test_eager_passes import UNIT, found_wrong, graph_of, with_collectives
from tests.unit.replay.test_verify import flip
from tests.unit.units import plain

MISMATCHES = [Mismatch("shape", f"argument {name}", "1", "2", "Cause.") for name in "ab"]
CALLS = ("replay", "mismatch", "evaluation", "no graphs", "verified", "repeat", "error")


def described(calls: list[str]) -> tuple[list[str], Counters]:
    happened: list[str] = []
    layer: Any = nn.Identity()
    mismatches = MismatchPolicy(ReplayPolicy(), Counters())
    mismatches.conditions.flush_prefetch = lambda: happened.append("held")
    graph = graph_of(mismatches)
    layer.cuda_graphs = [graph]
    layer.forward = lambda: happened.append("eager")
    prepared: Any = None

    def replay() -> None:
        happened.append("replay")
        if call == "error":
            raise KeyError(call)

    undo = replay_instead(layer, lambda _args, _kwargs: prepared)
    for number, call in enumerate(calls):
        layer.train(call != "evaluation")
        layer.cuda_graphs = [] if call == "no graphs" else [graph]
        prepared = {"mismatch": MISMATCHES[number % 2], "verified": None}.get(call, replay)
        mismatches.conditions.all_eager = call == "repeat"
        if call == "error":
            with pytest.raises(KeyError):
                layer()
        else:
            layer()
    undo()
    layer()
    assert happened.pop() == "eager"
    return happened, mismatches.counters


def test_what_was_deferred_is_issued_before_each_eager_pass_and_after_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = {
        "replay": ["replay"],
        "verified": ["eager"],
        "error": ["replay", "held"],
        **{key: ["held", "eager"] for key in ("mismatch", "evaluation", "no graphs", "repeat")},
    }
    for seed in range(200):
        calls = Random(seed).choices(CALLS, k=12)
        caplog.clear()
        happened, counters = described(calls)
        assert happened == [each for call in calls for each in expected[call]], seed
        eager = [call for call in calls if expected[call][0] == "held"]
        assert counters.eager == len(eager) and counters.mismatched == calls.count("mismatch"), seed
        reported = {number % 2 for number, call in enumerate(calls) if call == "mismatch"}
        assert len(caplog.records) == len(reported), seed


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize(
    ("voice", "asked_for", "instead"),
    [
        (Voice(), "(--cg-on-mismatch error)", "train without graphs: --cuda-graph-impl none."),
        (CallVoice(UNITS), "(graph_units(on_mismatch='error'))", "without graphs: no graph_units."),
    ],
)
def test_a_mismatch_ends_the_run_if_asked_for_or_if_ranks_cannot_agree(
    voice: Voice, asked_for: str, instead: str, collectives: bool
) -> None:
    asked: list[str] = []

    def disagree(name: str, here: bool, timeout: Any = None) -> bool:
        asked.append(name)
        raise RuntimeError("rank 1 is elsewhere")

    for on_mismatch in ("eager", "error"):
        policy = MismatchPolicy(ReplayPolicy(on_mismatch, voice=voice), Counters(), disagree)
        ends = collectives or on_mismatch == "error"
        try:
            policy.mismatched(MISMATCHES[0], "unit", collectives=collectives)
        except ReplayMismatchError as error:
            assert ends and (asked_for if on_mismatch == "error" else instead) in str(error)
        else:
            assert not ends
        with pytest.raises(ReplayMismatchError, match="cannot run eagerly"):
            policy.mismatched_in_backward(MISMATCHES[1], "unit")
    assert asked == ["unit/eager"] * collectives


def test_units_with_the_same_mismatch_are_named_together(caplog: pytest.LogCaptureFixture) -> None:
    policy = MismatchPolicy(ReplayPolicy(), Counters())
    for _ in range(3):
        policy.begin_step()
        for number in range(9, 13):
            policy.mismatched(MISMATCHES[0], f"layers.{number}", collectives=False)
    first, others = caplog.messages
    assert "no replay of layers.9: " in first and "of layers.10 to layers.12 for " in others


def test_settings_are_compared_as_a_pass_begins_that_may_leave_units_out() -> None:
    settings = SimpleNamespace(broken=partial(next, count()))
    with patch.object(mismatch_policy, "settings_of", return_value=settings):
        units = [Unit(UNIT, nn.Identity(), ())] * 3
        policy = MismatchPolicy(ReplayPolicy(), Counters(), units=units)
        found: list[Any] = [policy.other_setting(index) for index in (1, 2, 0, 1, 1, 2, 1)]
        policy.begin_step()
        assert [*found, policy.other_setting(2)] == [0, 0, 1, 1, 2, 2, 3, 4]


TURN, ROUND, LAYERS = 10, 300, 3
PAUSE = 15
"""Steps in which no unit replays."""
ORDERS = ([0, 1, 2], [0, 2], [0, 1], [0, 1, 1, 2])


def verifications_of(units: int, interval: int | None) -> Any:
    policy = ReplayPolicy("eager", interval)
    made = MismatchPolicy(policy, Counters(), units=[Unit(UNIT, nn.Identity(), ())] * units)
    return made.verifications


@pytest.mark.parametrize("units", [1, 3, 20, 48])
def test_each_unit_is_verified_soon_and_then_not_too_often(units: int) -> None:
    verifications = verifications_of(units, None)
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
    verifications = verifications_of(2, interval)
    for step in range(1, 8):
        verifications.begin_step()
        verifications.ended(0, None, gradients=True)  # The first of several replays.
        assert len(verifications.due) == 2 * (interval > 0 and step % interval == 0)


@pytest.mark.parametrize(
    ("direction", "tensors", "number", "name"),
    [
        ("forward", "outputs", 0, "output 0"),
        ("backward", "grad_inputs", 0, "the gradient of x"),
        ("backward", "grad_inputs", -1, "the gradient of linear.bias"),
    ],
)
def test_a_later_fault_is_found_when_its_unit_is_verified(
    direction: str, tensors: str, number: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
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

    def is_wrong(unit: str) -> bool:
        done.append((step, unit))
        return unit == wrong and step > 1

    run.with_graphs()
    for step in range((LAYERS + 1) * TURN + 2):
        order, losses = None if wrong or step < 2 else chance.choice(ORDERS), []
        with found_wrong(is_wrong):
            for one in (eager, run):
                torch.manual_seed(step)
                one.network.order = order
                losses.append(one.step())
        assert torch.equal(*losses), step
        if step and not refuted:
            refuted = step * bool(run.graphs.session.mismatches.verifications.refuted)
    counters = run.graphs.counters
    assert counters.verified == len(done) - LAYERS and counters.outputs_only == 0
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
    assert {name for _, name in one[0]["done"][LAYERS:]} == {f"layers.{n}" for n in range(LAYERS)}
    # Without collectives, the other rank hears of it when the next verification is due.
    assert [life["refuted"] for life in two] == [0, 2 * TURN, 2 * TURN]
    assert [life["refuted"] for life in one] == [0, 3 * TURN, 2 * TURN]
    assert all(life["eager"] for life in (*one, *two))
