"""What follows from the votes of all ranks, whoever asked and in whatever order."""

from __future__ import annotations

import torch

from megatron_cg.consensus.decision import Kind, Vote, decide, digest, encode


def test_of_two_sets_held_equally_often_that_of_the_lowest_rank_is_the_common_one() -> None:
    for held, minority in (((9, 3, 3, 9), (1, 2)), ((1, 1), ())):
        rows = [encode(Kind.DELETION, 3, Vote(graphs=graphs)) for graphs in held]
        assert decide(torch.stack(rows)).minority == minority


def test_a_digest_is_of_a_set_and_fits_a_row() -> None:
    assert digest(["b", "a", "b"]) == digest(("a", "b")) != digest(["ab"])
    assert digest(["a", "b"]) != digest(["a", "bc"]) and digest([]) != digest([""])
    assert all(0 < digest([str(number)]) < 2**63 for number in range(100))
