"""Parts of the fast path are left out one at a time; every clause of a real guard is timed."""

from collections.abc import Iterator

import pytest

from benchmarks import fast_path
from benchmarks.guard_cost import measure
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.trainers import trainer_of

NEEDED = {
    "unshard": {*("gradients", "scaled-copies", "detached-weights-of-graphs", "deferred-prefetch")},
    "gradients": {"scaled-copies", "detached-weights-of-graphs", "deferred-prefetch"},
    "detached-weights-of-graphs": {"deferred-prefetch"},
}


def test_each_part_is_left_out_in_turn_and_changes_no_number(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "WARMUP", 1)
    kinds: list[tuple[str, tuple[str, ...]]] = []

    def timed(left: str) -> Iterator[None]:
        kinds.append((left, tuple(session.fast_path.parts)))
        yield

    with trainer_of(CpuModelConfig(layers=2), graphs=True) as trainer:
        numbers = [trainer.step()]
        session = trainer.capture(TapeBackend())
        parts = session.fast_path.parts
        numbers += [trainer.step() for _ in fast_path.windows(session, parts, 2, timed)]
    with trainer_of(CpuModelConfig(layers=2)) as trainer:
        assert numbers == [trainer.step() for _ in numbers]
    names = [fast_path.NONE, *parts]
    assert [name for name, _ in kinds[1::2]] == [*names, *reversed(names)]
    assert set(kinds[::2]) == {(fast_path.ALL, tuple(parts))}
    for name, found in kinds[1::2]:
        off = set(parts) if name == fast_path.NONE else {name, *NEEDED.get(name, ())}
        assert set(found) == set(parts) - off


@pytest.mark.parametrize("experts", [0, 4])
def test_every_clause_of_a_guard_is_timed(experts: int, one_rank: None) -> None:
    costs = measure(experts, calls=2)
    assert all(cost > 0 for cost in costs.values())
    assert {"inputs", "modes", "objects, key sets, frozen", "hooks"} < set(costs)
    assert {"memory, forward", "memory, backward", "all, forward"} < set(costs)
