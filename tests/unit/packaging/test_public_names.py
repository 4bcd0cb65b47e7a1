"""What ``import megatron_cg`` gives: every public name, and torch only with those that need it."""

import importlib
from pathlib import Path

import pytest

import megatron_cg
from tests.unit.interpreted import python


def test_the_names_are_listed_and_there() -> None:
    assert set(dir(megatron_cg)) >= set(megatron_cg.__all__)
    assert all(getattr(megatron_cg, name) for name in megatron_cg.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'GraphedLayer'"):
        megatron_cg.GraphedLayer  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [("import megatron_cg", set()), ("from megatron_cg import graph_units", {"torch", "numpy"})],
)
def test_a_name_loads_what_it_needs_alone(statement: str, loaded: set[str]) -> None:
    ended = python(f"{statement}\nimport sys; print(*sys.modules)")
    assert {"torch", "megatron", "numpy"} & {*ended.stdout.split()} == loaded


FOLDER = Path(__file__).parents[2] / "functional"


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("test_*.py")))
def test_functional_tests_can_be_imported_without_a_gpu(name: str) -> None:
    importlib.import_module(f"tests.functional.{name}")
