"""Edges of the pure modules that nothing looked at, found by ``python -m tools.mutate``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_cg.backends.driver.schedule import schedule
from megatron_cg.consensus.decision import Level, Vote, ranks_text
from megatron_cg.errors import CaptureError


@pytest.mark.parametrize(
    ("order", "chunks", "layers", "samples", "said"),
    [
        ([1, 1.5, -1], [1], 1, 1, "not a whole chunk number"),
        ([1, 0, -1], [1], 1, 1, "not a whole chunk number"),
        ([1, 1, -1], [1], 1, 1, "does not fit 1 callables"),
        ([1, -1], [1], 2, 2, "with [1] layers a chunk does not fit 2 callables"),
        ([1, 1, -1, -1], [2], 2, 3, "and 3 sample_args"),
        (None, None, 2, 3, "3 sample_args for 2 callables"),
    ],
)
def test_an_order_that_cannot_be_is_refused_by_what_is_wrong_with_it(
    order: Sequence[int] | None, chunks: list[int] | None, layers: int, samples: int, said: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        schedule(layers, samples, order, chunks)
    assert said in str(caught.value) and "as Megatron's helper makes them" in str(caught.value)


def test_the_vote_of_a_rank_that_says_nothing() -> None:
    assert Vote() == Vote(Level.KEEP, size=0, graphs=0)


def test_a_list_of_ranks_is_cut_after_the_eighth() -> None:
    eight = "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert ranks_text(range(8)) == eight
    assert ranks_text(range(9)) == f"{eight} and 1 more"
