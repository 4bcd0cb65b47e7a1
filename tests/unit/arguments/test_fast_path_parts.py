"""Which parts a run may choose, and what a choice becomes."""

from __future__ import annotations

import pytest

from megatron_cg.arguments import GraphArguments
from megatron_cg.arguments.fast_path_parts import (
    NEEDS,
    PARTS,
    chosen_parts,
    mistakes,
    with_dependents,
)
from megatron_cg.arguments.rules_fast_path import parts_of

GRADIENTS = {"gradients", "detached-weights", "detached-weights-of-graphs", "deferred-prefetch"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (GraphArguments(), set(PARTS)),
        (GraphArguments(cg_no_fsdp_fast_path=True), set()),
        (GraphArguments(cg_fast_path="last-unit"), {"last-unit"}),
        (GraphArguments(cg_fast_path="gradients,unshard"), {"gradients", "unshard"}),
    ],
    ids=["default", "none", "one", "two"],
)
def test_flags_become_parts(flags: GraphArguments, expected: set[str]) -> None:
    assert parts_of(flags) == expected


def test_the_python_api_chooses_all_none_or_some() -> None:
    assert chosen_parts(True) == set(PARTS) and chosen_parts(False) == set()
    assert chosen_parts(["last-unit", "unshard"]) == {"last-unit", "unshard"}


def test_what_needs_a_part_goes_with_it() -> None:
    assert with_dependents("unshard") == {"unshard", *GRADIENTS}
    assert with_dependents("gathers") == {"gathers", "deferred-prefetch"}
    assert with_dependents("last-unit") == {"last-unit"}


@pytest.mark.parametrize("part", PARTS)
def test_all_parts_but_one_are_a_choice_without_mistakes(part: str) -> None:
    assert not list(mistakes([name for name in PARTS if name not in with_dependents(part)]))
    alone = list(mistakes([part]))
    assert len(alone) == bool(NEEDS[part])


def test_a_needed_part_that_is_misspelled_is_the_only_mistake() -> None:
    (found,) = mistakes(["gradients", "unshrad"])
    assert found[0] == "'unshrad' (did you mean unshard?)"


def test_names_can_be_typed() -> None:
    assert all(name.replace("-", "").isalpha() and name.islower() for name in PARTS)
