"""The dispatcher against Megatron's, with routings that a router seldom makes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from megatron_cg.tools.cpu.launch import run_processes
from tests.unit.moe.routings import ROUTINGS, compare, overflow


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_routing_gives_megatrons_bits(ranks: int, tmp_path: Path) -> None:
    run_processes(partial(compare, tmp_path), ranks)
    for rank in range(ranks):
        equal = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(equal) == 2 * len(ROUTINGS)
        # Output, hidden states, probabilities and at least one weight.
        assert all(len(found) >= 4 and all(found) for found in equal.values()), equal


@pytest.mark.parametrize("ranks", [2, 4])
def test_beyond_a_bound_all_numbers_are_finite(ranks: int, tmp_path: Path) -> None:
    run_processes(partial(overflow, tmp_path), ranks)
    for rank in range(ranks):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == []
