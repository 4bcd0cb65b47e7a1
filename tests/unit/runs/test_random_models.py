"""Random models and lives: a few seeds of ``tools.random_models``, which tries as many as asked."""

import pytest

from tools.random_models import EVENTS, FROZEN, LATER, STRATEGIES, draw, tried

SEEDS, TRIED = range(300), range(20)


def test_seeds_draw_everything_that_can_be_drawn() -> None:
    drawn = [draw(seed) for seed in SEEDS]
    assert {event for one in drawn for event in one.events.values()} == {*EVENTS, *LATER}
    strategies = {one.model.fsdp_options["data_parallel_sharding_strategy"] for one in drawn}
    assert strategies == set(STRATEGIES)
    assert {name for one in drawn for name in one.frozen} == set(FROZEN)
    assert {one.verify_interval for one in drawn} == {0, 1, 2}
    for name in ("processes", "fast_path", "torch_gemm", "peers", "on_meta"):
        assert len({getattr(one, name) for one in drawn}) == 2
    for name in ("tensor_parallel", "expert_parallel", "bf16", "grouped"):
        assert len({getattr(one.model, name) for one in drawn}) == 2
    assert len({one.model.graph_modules for one in drawn}) == 10


@pytest.fixture(scope="module")
def lines() -> dict[int, tuple[bool, str]]:
    return tried(TRIED)


@pytest.mark.parametrize("seed", TRIED)
def test_its_runs_are_equal(lines: dict[int, tuple[bool, str]], seed: int) -> None:
    equal, line = lines[seed]
    assert equal, line
