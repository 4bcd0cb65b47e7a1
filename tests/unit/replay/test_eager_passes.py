"""Where graphs hold collectives, no rank runs eagerly what others replay without a vote."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.consensus import exchange as agreement
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay import guarded_graph as graphed
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.guarded_graph import GuardedGraph, ReplayFunction
from megatron_cg.replay.mismatch_policy import Counters, MismatchPolicy, ReplayPolicy
from megatron_cg.replay.unit import Unit
from tests.unit.ranks import ended, on_ranks, soon_over

pytest.importorskip("megatron_fsdp")
UNIT = "layers.1"
WRONG = Mismatch("verification", "output 0", "one", "other", "Cause.")


def graph_of(mismatches: MismatchPolicy, *, collectives: bool = False) -> GuardedGraph:
    """A graph of a unit, for what it does around passes."""
    none: Any = None
    unit, replay = Unit(UNIT, nn.Identity(), ()), ReplayFunction(none, 0, none, none, ())
    more = {"index": 0, "in_flight": none, "kept": none, "prepare_backward": none}
    return GuardedGraph(none, none, unit, mismatches, replay, **more, collectives=collectives)


CHANGES: dict[str, Callable[[Any], object]] = {
    "flag": lambda run: setattr(run.network, "doubled", True),
    "unit twice": lambda run: setattr(run.network, "order", [0, 1, 1, 2]),
    "evaluation": lambda run: run.network.layers[1].eval(),
    "training": lambda run: run.network.layers[1].train(),
    "graphs taken": lambda run: setattr(run.network.layers[1], "cuda_graphs", []),
    "nothing": lambda run: None,
    "refuted": lambda run: None,
}
STEPS: list[tuple[str, list[str]]] = [
    *(("nothing", []), ("flag", [f"layers.{n}/eager" for n in "012"])),
    *(("unit twice", [f"{UNIT}/eager"]), ("evaluation", [f"{UNIT}/eager"]), ("evaluation", [])),
    *(("training", [f"{UNIT}/replayed"]), ("refuted", [f"{UNIT}/eager"])),
    *(("graphs taken", [f"{UNIT}/eager"]), ("nothing", [])),
]
"""What all ranks do before a step, and the votes on it. The seventh step is verified."""


@contextmanager
def found_wrong(is_wrong: Callable[[str], bool]) -> Iterator[None]:
    """On one rank, replays of such units are told to differ, though none does."""
    real = cast(Any, graphed).verify

    def verify(unit: Any, *arguments: Any, **options: Any) -> tuple[Mismatch | None, int]:
        assert real(unit, *arguments, **options) == (None, 0)
        here = is_wrong(unit.name) and dist.get_rank() == 1
        return (WRONG if options["on_any_rank"](here) else None), 0

    with patch.object(graphed, "verify", verify):
        yield


def with_collectives() -> Any:
    """A run whose units sum something over all ranks, as tensor parallelism does."""
    from tests.unit.units.sharded import Block, v1_run

    real = Block.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        out: torch.Tensor = real(self, x, *args, **kwargs) + 1e-3 * total
        return out

    with patch.object(Block, "forward", forward):
        run = v1_run()
    layer: Any
    for layer in run.network.layers:
        layer.forward = partial(forward, layer)
        layer.dropout.p = 0.0
    return run


def together() -> tuple[list[Any], list[str]]:
    """Of each step its votes, and losses of an eager run and this one; what is left behind."""
    eager, run = with_collectives(), with_collectives()
    run.with_graphs(verify_interval=7)
    votes: list[str] = []
    real = Agreement.on_any_rank

    def leave(self: Any, name: str, here: bool, timeout: timedelta | None) -> bool:
        if "/" in name:  # not a vote on a verification
            votes.append(name)
        return real(self, name, here, timeout)

    found: list[Any] = []
    with patch.object(Agreement, "on_any_rank", leave):
        assert torch.equal(eager.step(), run.step())
        for name, _ in STEPS:
            for one in (eager, run):
                one.network.doubled, one.network.order = False, None
                if one is run or not name.startswith("graphs"):
                    CHANGES[name](one)
            with found_wrong(lambda unit: unit == UNIT) if name == "refuted" else nullcontext():
                losses = [one.step().tolist() for one in (eager, run)]
            found.append((sorted(votes), *losses))
            votes.clear()
        run.graphs.close()
    return found, [layer.forward.func.__name__ for layer in run.network.layers]


def test_all_ranks_vote_before_a_unit_runs_eagerly() -> None:
    for steps, left in on_ranks(together):
        assert left == ["forward"] * 3
        for (name, wanted), (votes, eager, replayed) in zip(STEPS, steps, strict=True):
            assert votes == sorted(wanted) and replayed == eager, name


@pytest.mark.parametrize(("turn", "waits"), [(True, agreement.TIMEOUT), (False, None)])
def test_a_turn_waits_long_and_a_mismatch_does_not(turn: bool, waits: timedelta | None) -> None:
    """A checkpoint or a first batch of data may lie before a turn, on some ranks only."""
    asked: list[Any] = []

    def on_any_rank(*given: Any) -> bool:
        asked.append(given)
        return True

    mismatches = MismatchPolicy(ReplayPolicy(), Counters(), on_any_rank)
    graph = graph_of(mismatches, collectives=True)
    if turn:
        graph.begin_eagerly("it is in evaluation mode")
        graph.turn("replays", "replayed", replays=True)
    else:
        graph.begin_eagerly(WRONG)
    assert [given[2] for given in asked] == [waits] * (2 if turn else 1)


def alone(change: str) -> None:
    """Rank 1 changes something by itself; rank 0 waits in its replay, until rank 1 has ended."""
    run = with_collectives()
    run.with_graphs()
    run.step()
    run.step()
    if dist.get_rank() == 1:
        CHANGES[change](run)
    with soon_over():
        run.step()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("flag", "layers.0: argument number 1 was False at capture"),
        ("evaluation", f"{UNIT} turns to eager passes, since it is in evaluation mode"),
        ("graphs taken", f"{UNIT} turns to eager passes, since its graphs were deleted"),
    ],
)
def test_a_rank_that_leaves_alone_ends(change: str, words: str) -> None:
    ends = ended(partial(alone, change), ReplayMismatchError)
    assert [*ends] == [1] and "The graph holds collectives" in ends[1]
    assert f"ReplayMismatchError: {words}" in ends[1]
