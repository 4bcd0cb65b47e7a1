"""Records to make pages of: made-up ones, and those of two real runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tools.report.made_up import make_record, write
from tests.unit.tools.report.tape_runs import make_pair


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of two ranks with everything that a record can hold; its losses come to differ."""
    directory = tmp_path_factory.mktemp("made-up")
    write(directory / "eager" / "record", *[make_record(graphs=False)] * 2)
    write(directory / "graphs" / "record", *[make_record(off=17)] * 2)
    return directory


@pytest.fixture
def tape_pair(one_rank: None, tmp_path: Path) -> Path:
    """A pair of real runs."""
    return make_pair(tmp_path / "tape")
