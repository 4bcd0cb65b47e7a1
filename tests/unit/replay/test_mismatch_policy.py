"""What one call of a unit does: which pass runs, what comes before it, and what is said."""

import logging
from random import Random
from typing import Any

import pytest
from torch import nn

from megatron_cg.errors import ReplayMismatchError, Voice
from megatron_cg.integrations.call_arguments import UNITS, CallVoice
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guarded_graph import replay_instead
from megatron_cg.replay.mismatch_policy import Counters, MismatchPolicy, ReplayPolicy
from tests.unit.replay.test_eager_passes import graph_of

LOGGER = "megatron_cg.replay.mismatch_policy"
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
        mismatches.conditions.repeats = call == "repeat"
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
        with caplog.at_level(logging.WARNING, LOGGER):
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
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(3):
            policy.begin_step()
            for number in range(9, 13):
                policy.mismatched(MISMATCHES[0], f"layers.{number}", collectives=False)
    first, others = caplog.messages
    assert "no replay of layers.9: " in first and "of layers.10 to layers.12 for " in others
