"""Random models and lives: a few seeds of ``tools.random_models``, which tries as many as asked."""

import pytest

from tools.random_models import tried

TRIED = range(20)


@pytest.fixture(scope="module")
def lines() -> dict[int, tuple[bool, str]]:
    return tried(TRIED)


@pytest.mark.parametrize("seed", TRIED)
def test_its_runs_are_equal(lines: dict[int, tuple[bool, str]], seed: int) -> None:
    equal, line = lines[seed]
    assert equal, line
