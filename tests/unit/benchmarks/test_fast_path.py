"""Parts of the fast path are left out one at a time, with those that need them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import fast_path
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.trainers import trainer_of

NEEDED = {
    "unshard": {
        *("gradients", "scaled-copies", "detached-weights-of-graphs", "deferred-prefetch"),
    },
    "gathers": {"deferred-prefetch"},
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


def test_a_part_is_compared_with_the_windows_beside_it() -> None:
    def window(left: str, ms: float, mib: float = 10.0) -> dict[str, Any]:
        return {"without": left, "step_ms": [ms, ms, 10 * ms], "allocated_mib": mib}

    both = [fast_path.ALL, "gathers"] * 2 + [fast_path.ALL]
    lines = [window(*one) for one in zip(both, (100, 121, 120, 126, 132), strict=True)]
    lines[1]["allocated_mib"] = lines[3]["allocated_mib"] = 12.0
    shown = fast_path.table(lines)
    assert "| gathers | 123.5 | 118.0 | +5.0 | +10.0, +0.0 | +2 |" in shown
    drift = [abs(a / b - 1) for a, b in pairwise((100, 120, 132))]
    assert f"differ by {sum(drift) / 2 * 100:.1f}%" in shown
