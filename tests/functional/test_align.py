"""Eager and graphed training agree bit for bit in every configuration of the support table."""

from collections.abc import Callable

import pytest

from megatron_cg.tools.record.compare import Outcome
from tests.functional.cases import (
    CASES,
    FEATURES,
    LARGE,
    PACKED,
    SAVES,
    UNDER_V2,
    WITHOUT_ROOM,
    Case,
)
from tests.functional.outcomes import assert_identical


@pytest.mark.parametrize(
    "case", [*CASES, *PACKED, *FEATURES, *UNDER_V2], ids=lambda case: case.name
)
def test_losses_norms_and_shards_are_bit_equal(case: Case, align: Callable[..., Outcome]) -> None:
    """Only evaluation, saved passes, and what had no room ran captured layers eagerly."""
    outcome = align(case)
    assert_identical(outcome, case.steps)
    comparison = outcome.comparison
    evaluated = any(value.name.startswith("evaluation ") for value in comparison.values)
    assert evaluated == ("--eval-interval" in case.flags)
    alone = evaluated or SAVES in case.flags or case.name in WITHOUT_ROOM
    assert (comparison.graphs["eager"] > 0) == alone


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_four_and_eight_ranks_are_bit_equal(case: Case, align: Callable[..., Outcome]) -> None:
    assert_identical(align(case), case.steps)
