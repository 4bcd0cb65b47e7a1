"""Between steps all ranks capture again, or none does; without that they hang."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_cg.consensus import boundary
from megatron_cg.consensus.boundary import Boundary
from megatron_cg.consensus.decision import AgreementError, Decision, Kind, Level, Vote
from megatron_cg.consensus.exchange import Agreement
from tests.unit.ranks import on_ranks

KEEP, RECAPTURE, GIVE_UP = Level
LONG = timedelta(minutes=10)
RANKS = 4


class Owner:
    """Whose graphs a boundary decides on: one request a step, and what was done before which."""

    def __init__(self, *requests: Vote | Level) -> None:
        self.requests = [w if isinstance(w, Vote) else Vote(w) for w in requests]
        self.done: list[str] = []
        self.votes = Agreement(LONG)
        self.boundary = Boundary(self.votes, self.vote, self.recapture, self.give_up)

    def vote(self) -> Vote:
        return self.requests.pop(0)

    def recapture(self) -> None:
        self.done.append("recapture")

    def give_up(self, decision: Decision) -> None:
        self.done.append(f"give up: {decision.reason()}")

    def run(self) -> list[str]:
        """Train as many steps as there are requests; return what was done and when."""
        while self.requests:
            self.boundary.before_step()
            self.done.append("step")
            self.boundary.after_step()
        return self.done


def test_nothing_is_done_when_nobody_asks(one_rank: None) -> None:
    owner = Owner(KEEP, KEEP, KEEP, KEEP)
    assert owner.run() == ["step"] * 4
    assert owner.votes.time.votes == 4


def test_a_request_is_done_once_and_a_step_later(one_rank: None) -> None:
    owner = Owner(KEEP, RECAPTURE, RECAPTURE, KEEP, KEEP, KEEP)
    assert owner.run() == ["step"] * 3 + ["recapture"] + ["step"] * 3


def test_a_step_that_is_begun_twice_recaptures_once(one_rank: None) -> None:
    owner = Owner(RECAPTURE, KEEP)
    owner.run()
    owner.boundary.before_step()
    owner.boundary.before_step()
    assert owner.done == ["step", "step", "recapture"]


def test_a_request_after_the_recapture_is_a_new_one(one_rank: None) -> None:
    owner = Owner(RECAPTURE, RECAPTURE, RECAPTURE, KEEP, KEEP)
    assert owner.run() == ["step", "step", "recapture", "step", "step", "recapture", "step"]


@pytest.mark.parametrize("requests", [(RECAPTURE, GIVE_UP), (GIVE_UP, RECAPTURE)])
def test_giving_up_comes_before_a_recapture(one_rank: None, requests: tuple[Level, Level]) -> None:
    reason = "give up: rank 0 asked to discard the graphs"
    assert Owner(*requests, KEEP, KEEP, KEEP).run() == ["step", "step", reason, *["step"] * 3]


def test_what_changes_collectives_is_undone_once_all_give_up(one_rank: None) -> None:
    owner = Owner(Vote(GIVE_UP, graphs=1), *[Vote(graphs=1)] * 3)
    owner.votes.undo_together(lambda: owner.done.append("undo"))
    reason = "give up: rank 0 asked to discard the graphs"
    assert owner.run() == ["step", "step", reason, "undo", "step", "step"]


def test_what_changes_collectives_is_undone_once_no_rank_has_graphs(one_rank: None) -> None:
    held, none = Vote(graphs=1), Vote()
    owner = Owner(none, none, held, none, none, none)
    for number in range(6):
        owner.boundary.before_step()
        if number == 2:
            # All capture. Votes of before are of ranks without graphs, and of no account.
            owner.votes.undo_together(lambda: owner.done.append("undo"))
        owner.done.append(f"step {number}")
        owner.boundary.after_step()
    # Step 3 was the first without graphs; it is voted on after it, and known after the next.
    assert owner.done == [*(f"step {number}" for number in range(5)), "undo", "step 5"]


def test_what_a_new_capture_has_changed_outlives_votes_of_before(one_rank: None) -> None:
    held, none = Vote(graphs=1), Vote()
    owner = Owner(none, none, none, held, held, held)
    owner.votes.undo_together(lambda: owner.done.append("undo"))
    for number in range(6):
        owner.boundary.before_step()
        if number == 3:
            owner.votes.undo_together(lambda: owner.done.append("undo the new"))
        owner.boundary.after_step()
    assert owner.done == ["undo"] and owner.votes.left == 2


def test_what_changes_collectives_is_undone_at_the_end_and_once(one_rank: None) -> None:
    votes = Agreement(LONG)
    done: list[str] = []
    for name in ("first", "last"):
        votes.undo_together(partial(done.append, name))
    assert votes.left == 2
    votes.close()
    votes.close()
    assert done == ["last", "first"] and votes.left is None


def test_nothing_is_decided_after_the_close(one_rank: None) -> None:
    owner = Owner(RECAPTURE, RECAPTURE, RECAPTURE)
    for _ in range(2):
        owner.boundary.after_step()
    owner.boundary.close()
    owner.boundary.close()
    owner.boundary.before_step()
    owner.boundary.after_step()
    assert owner.done == [] and len(owner.requests) == 1
    owner.boundary = Boundary(owner.votes, owner.vote, owner.recapture, owner.give_up)
    assert owner.run() == ["step"]


def test_a_boundary_closes_after_the_process_groups(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    owner = Owner(KEEP)
    owner.run()
    dist.destroy_process_group()
    owner.boundary.close()
    assert owner.votes.collect() is None


def test_a_vote_made_within_a_step_does_not_disturb_the_posted_one(one_rank: None) -> None:
    owner = Owner(RECAPTURE, KEEP, KEEP)
    owner.boundary.after_step()
    assert owner.votes.agree(Kind.MISMATCH, Vote()).level is KEEP
    assert owner.run() == ["step", "recapture", "step"]


def decided_together(rank: int) -> Any:
    """Rank 2 asks for a recapture; later rank 1 holds other graphs than the rest."""
    requests = [Vote(RECAPTURE if rank == 2 and step == 1 else KEEP) for step in range(5)]
    requests += [Vote(graphs=1 + (rank == 1)), *[Vote()] * 3]
    return Owner(*requests).run()


def at_other_steps(rank: int) -> Any:
    owner = Owner(KEEP)
    owner.boundary.after_step(10 + (rank == 3))
    try:
        owner.boundary.after_step()
    except AgreementError as error:
        return str(error)
    return "went on"


def closed_alone(rank: int) -> Any:
    """Rank 0 has posted a vote to which the others never come, and closes."""
    owner = Owner(KEEP)
    text = ""
    if rank == 0:
        owner.boundary.after_step()
        with patch.object(boundary, "CLOSING", timedelta(seconds=0.1)):
            owner.boundary.close()
        try:
            owner.votes.ready()
        except AgreementError as error:
            text = str(error)
    dist.barrier()
    return text


def play() -> dict[str, Any]:
    """In one process: all that needs four."""
    rank = dist.get_rank()
    scenarios = (decided_together, at_other_steps, closed_alone)
    return {scenario.__name__: scenario(rank) for scenario in scenarios}


@pytest.fixture(scope="module")
def told() -> Callable[[Any], list[Any]]:
    """What a scenario came to on each rank."""
    ranks = on_ranks(play, RANKS)
    return lambda scenario: [found[scenario.__name__] for found in ranks]


def test_all_ranks_do_what_one_asks_for_before_the_same_step(told: Any) -> None:
    minority = "give up: rank 1 and the other ranks hold different sets of graphs"
    steps = [*["step"] * 3, "recapture", *["step"] * 4, minority, *["step"] * 2]
    assert told(decided_together) == [steps] * RANKS


def test_ranks_at_other_steps_all_end(told: Any) -> None:
    for text in told(at_other_steps):
        assert "ranks 0, 1, 2 to step 10, rank 3 to step 11" in text


def test_closing_waits_no_longer_than_its_own_bound_for_ranks_that_never_come(told: Any) -> None:
    assert "(gloo: Operation timed out!)" in told(closed_alone)[0]
