"""Every clause of a real guard is timed."""

import pytest

from benchmarks.guard_cost import measure


@pytest.mark.parametrize("experts", [0, 4])
def test_every_clause_of_a_guard_is_timed(experts: int, one_rank: None) -> None:
    costs = measure(experts, calls=2)
    assert all(cost > 0 for cost in costs.values())
    assert {"inputs", "modes", "objects, key sets, frozen", "hooks"} < set(costs)
    assert {"memory, forward", "memory, backward", "all, forward"} < set(costs)
