"""Eager and graphed training agree bit for bit in every configuration of the support table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_cg.tools.align.compare import Outcome
from tests.functional.cases import CASES, FEATURES, SAVES, Case


@pytest.mark.parametrize("case", [*CASES, *FEATURES], ids=lambda case: case.name)
def test_losses_norms_and_shards_are_bit_equal(case: Case, align: Callable[..., Outcome]) -> None:
    assert_identical(case, align(case))


def assert_identical(case: Case, outcome: Outcome) -> None:
    """Every step and every shard is equal.

    Only evaluation, and steps whose passes are saved, ran captured layers eagerly.
    """
    comparison = outcome.comparison
    assert comparison.status == "identical", comparison.reason + "\n" + outcome.log_tail
    assert comparison.shards > 0
    assert len({value.step for value in comparison.values}) == case.steps
    assert comparison.graphs["captured"] > 0
    assert comparison.graphs["replayed"] > 0
    evaluated = any(value.name.startswith("evaluation ") for value in comparison.values)
    assert evaluated == ("--eval-interval" in case.flags)
    assert (comparison.graphs["eager"] > 0) == (evaluated or SAVES in case.flags)
