"""Between steps all ranks give up their graphs, or none does; without that they hang."""

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
from megatron_cg.consensus.decision import AgreementError, Decision, Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from tests.unit.ranks import on_ranks

LONG = timedelta(minutes=10)
RANKS = 4


class Owner:
    """Whose graphs a boundary decides on: their digest after each step, and what was done when."""

    def __init__(self, *held: int) -> None:
        self.held = list(held)
        self.done: list[str] = []
        self.votes = Agreement(LONG)
        self.boundary = Boundary(self.votes, self.graphs, self.give_up)

    def graphs(self) -> int:
        return self.held.pop(0)

    def give_up(self, decision: Decision) -> None:
        self.done.append(f"give up: {decision.reason()}")

    def run(self) -> list[str]:
        """Train as many steps as there are digests; return what was done and when."""
        while self.held:
            self.boundary.before_step()
            self.done.append("step")
            self.boundary.after_step()
        return self.done


def test_nothing_is_done_when_all_hold_the_same(one_rank: None) -> None:
    owner = Owner(1, 1, 2, 0)
    assert owner.run() == ["step"] * 4


def test_what_changes_collectives_is_undone_once_no_rank_has_graphs(one_rank: None) -> None:
    owner = Owner(0, 0, 1, 0, 0, 0)
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
    owner = Owner(0, 0, 0, 1, 1, 1)
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
    owner = Owner(1, 1, 1)
    for _ in range(2):
        owner.boundary.after_step()
    owner.boundary.close()
    owner.boundary.close()
    owner.boundary.before_step()
    owner.boundary.after_step()
    assert owner.done == [] and len(owner.held) == 1
    owner.boundary = Boundary(owner.votes, owner.graphs, owner.give_up)
    assert owner.run() == ["step"]


def test_a_boundary_closes_after_the_process_groups(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    owner = Owner(0)
    owner.run()
    dist.destroy_process_group()
    owner.boundary.close()
    assert owner.votes.collect() is None


def test_a_vote_made_within_a_step_does_not_disturb_the_posted_one(one_rank: None) -> None:
    owner = Owner(1)
    owner.boundary.after_step()
    assert owner.votes.agree(Kind.MISMATCH, Vote(graphs=2)) == Decision()
    decision = owner.votes.collect()
    assert decision == Decision()


def decided_together(rank: int) -> Any:
    """Rank 1 loses its graphs; after all have given up theirs, what they left there is undone."""
    owner = Owner(1, int(rank != 1), int(rank != 1), 0, 0, 0)
    owner.votes.undo_together(lambda: owner.done.append("undo"))
    return owner.run()


def at_other_steps(rank: int) -> Any:
    owner = Owner(0)
    owner.boundary.after_step(10 + (rank == 3))
    try:
        owner.boundary.after_step()
    except AgreementError as error:
        return str(error)
    return "went on"


def closed_alone(rank: int) -> Any:
    """Rank 0 has posted a vote to which the others never come, and closes."""
    owner = Owner(0)
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


def test_all_ranks_give_up_once_and_before_the_same_step(told: Any) -> None:
    given_up = "give up: rank 1 and the other ranks hold different sets of graphs"
    lost, *others = (found[3:5] for found in told(decided_together)[1:])
    assert lost == ["undo", given_up] and others == [[given_up, "undo"]] * (RANKS - 2)
    assert all(found[:3] + found[5:] == ["step"] * 6 for found in told(decided_together))


def test_ranks_at_other_steps_all_end(told: Any) -> None:
    for text in told(at_other_steps):
        assert "ranks 0, 1, 2 to step 10, rank 3 to step 11" in text


def test_closing_waits_no_longer_than_its_own_bound_for_ranks_that_never_come(told: Any) -> None:
    assert "(gloo: Operation timed out!)" in told(closed_alone)[0]
