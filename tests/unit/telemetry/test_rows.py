"""Rows of a long run take little memory and are all there in the end."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megatron_cg.telemetry.record import exact
from megatron_cg.telemetry.rows import Rows


def step(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    losses = {name: exact(chance.random()) for name in ("lm loss", "load balancing loss")}
    return {"losses": losses, "grad_norm": exact(chance.random()), "milliseconds": number * 1.1}


@pytest.mark.parametrize("number", [0, 1, 999, 1000, 1001, 2500])
def test_all_rows_are_there_in_order(number: int) -> None:
    rows, expected = Rows(), [step(n) for n in range(number)]
    for row in expected:
        rows.append(dict(row))
    assert len(rows) == number and json.loads(rows.text()) == expected
    assert rows.last == (expected[-1] if expected else None)


@pytest.mark.parametrize("number", [1, 1000, 1001])
def test_the_last_row_may_still_change(number: int) -> None:
    rows = Rows()
    for n in range(number):
        rows.append({"n": n})
        assert rows.last is not None
        rows.last["phases"] = {"é": n}
    assert json.loads(rows.text()) == [{"n": n, "phases": {"é": n}} for n in range(number)]


def test_no_dictionary_of_old_rows_is_kept() -> None:
    """What 200,000 steps take would be 305 MiB."""
    rows = Rows()
    for number in range(5001):
        rows.append(step(number))
    assert len(rows._open) == 1
    assert 0 < rows.held_bytes < 150 * 5000
