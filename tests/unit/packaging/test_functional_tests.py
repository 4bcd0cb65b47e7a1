"""The functional tests need GPUs to run, and none to be imported: their names exist."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "functional"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("test_*.py")))
def test_all_that_it_imports_is_there(name: str) -> None:
    importlib.import_module(f"tests.functional.{name}")
