"""What ``import megatron_cg`` gives: every public name, and torch only with those that need it."""

import subprocess
import sys

import pytest

import megatron_cg


def test_the_names_are_listed_and_there() -> None:
    from megatron_cg.integrations.megatron.loop import GraphedLayers
    from megatron_cg.integrations.standalone import GraphedUnits, graph_units

    assert set(dir(megatron_cg)) >= set(megatron_cg.__all__)
    assert all(getattr(megatron_cg, name) for name in megatron_cg.__all__)
    assert megatron_cg.GraphedLayers is GraphedLayers
    assert megatron_cg.GraphedUnits is GraphedUnits
    assert megatron_cg.graph_units is graph_units


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'GraphedLayer'"):
        megatron_cg.GraphedLayer  # noqa: B018


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_the_package_alone_is_light() -> None:
    assert {"torch", "megatron", "numpy"}.isdisjoint(loaded_by("import megatron_cg"))


def test_the_standalone_names_need_no_megatron_core() -> None:
    found = loaded_by("from megatron_cg import graph_units")
    assert "torch" in found and "megatron" not in found
