"""A rank that fails inside the comparison, while another may wait for it in a collective."""

from __future__ import annotations

import atexit
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_cg.compiled import load as load_module
from megatron_cg.compiled.load import load
from megatron_cg.compiled.save import save
from megatron_cg.consensus import process_exit
from megatron_cg.consensus.decision import AgreementError
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArtifactRefusedError
from tests.unit.compiled.regions import gathered_columns
from tests.unit.ranks import on_ranks


def fails(_region: object, _compiled: object) -> None:
    raise torch.OutOfMemoryError("forced")


def load_on_a_rank(folder: Path, failing: tuple[int, ...]) -> str:
    """Ranks in ``failing`` fail before the first collective of the comparison."""
    region = gathered_columns("cpu")
    if dist.get_rank() in failing:
        load_module.first_difference = fails  # type: ignore[assignment]
    load_module.FAILED_ALONE = timedelta(seconds=3)
    votes = Agreement(timedelta(seconds=60))
    try:
        return str(load(folder, "columns", region, votes))
    except ArtifactRefusedError as error:
        return f"refused: {error}"
    except AgreementError as error:
        atexit.unregister(process_exit._leave)
        return f"{error}; after {type(error.__cause__).__name__}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    torch.use_deterministic_algorithms(True)  # As on the ranks.
    try:
        save(gathered_columns, folder, name="columns", world_size=2, capability=None)
    finally:
        torch.use_deterministic_algorithms(False)
    return folder


def test_a_rank_that_failed_alone_ends_and_so_does_the_one_that_waits_for_it(folder: Path) -> None:
    waits, fails = on_ranks(partial(load_on_a_rank, folder, (1,)))
    assert fails.startswith("OutOfMemoryError while the artifact was compared: forced. Then a rank")
    assert fails.endswith("; after OutOfMemoryError")
    assert "did not join a vote in time" in waits


def test_ranks_that_all_failed_refuse_the_artifact_together(folder: Path) -> None:
    said = "refused: the artifact could not be compared: OutOfMemoryError: forced"
    assert on_ranks(partial(load_on_a_rank, folder, (0, 1))) == [said] * 2
