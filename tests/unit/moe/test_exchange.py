"""An exchange by counts on the device against an all-to-all by counts on the host."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from megatron_cg.tools.cpu.launch import run_processes
from tests.unit.moe.exchanges import check


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_and_gradients_arrive_as_with_counts_on_the_host(ranks: int, tmp_path: Path) -> None:
    run_processes(partial(check, tmp_path), ranks)
    for rank in range(ranks):
        assert json.loads((tmp_path / f"{rank} of {ranks}.json").read_text()) == []
