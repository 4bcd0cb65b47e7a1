"""What follows from the votes of all ranks, whoever asked and in whatever order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron_cg.consensus.decision import (
    AgreementError,
    Decision,
    Kind,
    Vote,
    decide,
    digest,
    encode,
)


def decided(votes: Iterable[Vote]) -> Decision:
    return decide(torch.stack([encode(Kind.DELETION, 3, vote) for vote in votes]))


def against(*votes: bool) -> Decision:
    return decided(map(Vote, votes))


@pytest.mark.parametrize("kind", Kind)
def test_votes_of_every_kind_have_one_shape(kind: Kind) -> None:
    row = encode(kind, 2**40, Vote(True, 2**40, 2**63 - 1))
    assert row.dtype is torch.int64 and row.device.type == "cpu"
    assert row.tolist() == [kind, 2**40, 1, 2**40, 2**63 - 1]


def test_a_decision_says_who_is_against_it() -> None:
    assert against(False, False) == Decision()
    assert against(False, True, False, True) == Decision((1, 3))
    assert against(True) == Decision((0,))


def test_sizes_that_differ_are_named() -> None:
    same = decided([Vote(size=96), Vote(size=96)])
    other = decided([Vote(size=96), Vote(size=128), Vote(size=0)])
    assert same.sizes_agree and (same.smallest, same.largest) == (96, 96)
    assert (other.smallest, other.largest, other.sizes_agree) == (0, 128, False)
    assert other.difference() == "static sizes go from 0 to 128"


@pytest.mark.parametrize("minority", range(3))
def test_the_ranks_that_hold_another_set_of_graphs_are_named(minority: int) -> None:
    votes = [Vote(graphs=digest(["a", "b"]))] * 3
    votes[minority] = Vote(graphs=digest(["a"]))
    decision = decided(votes)
    assert decision.minority == (minority,) and decision.against == ()
    assert f"rank {minority} would capture other graphs than" in decision.difference()


def test_of_two_sets_held_equally_often_that_of_the_lowest_rank_is_the_common_one() -> None:
    votes = [Vote(graphs=held) for held in (9, 3, 3, 9)]
    assert decided(votes).minority == (1, 2)
    assert decided([Vote(graphs=1), Vote(graphs=1)]).minority == ()


def test_a_digest_is_of_a_set_and_fits_a_row() -> None:
    assert digest(["b", "a", "b"]) == digest(("a", "b")) != digest(["ab"])
    assert digest(["a", "b"]) != digest(["a", "bc"]) and digest([]) != digest([""])
    assert all(0 < digest([str(number)]) < 2**63 for number in range(100))


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (encode(Kind.MISMATCH, 3, Vote()), "mismatch 3 on rank 1"),
        (encode(Kind.DELETION, 4, Vote()), "deletion 4 on rank 1"),
    ],
)
def test_different_votes_are_an_error_that_names_them(others: torch.Tensor, named: str) -> None:
    own = encode(Kind.DELETION, 3, Vote(against=True))
    with pytest.raises(AgreementError) as caught:
        decide(torch.stack([own, others, own]))
    assert f"deletion 3 on ranks 0, 2, {named}" in str(caught.value)
