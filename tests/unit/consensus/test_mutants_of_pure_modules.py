"""Edges of the pure modules that nothing looked at, found by ``python -m tools.mutate``."""

from __future__ import annotations

from megatron_cg.consensus.decision import Level, Vote, ranks_text


def test_the_vote_of_a_rank_that_says_nothing() -> None:
    assert Vote() == Vote(Level.KEEP, size=0, graphs=0)


def test_a_list_of_ranks_is_cut_after_the_eighth() -> None:
    eight = "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert ranks_text(range(8)) == eight
    assert ranks_text(range(9)) == f"{eight} and 1 more"
