"""pyproject.toml: one version, bounds that hold what is tested, and every import declared."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_cg.arguments.rules import _SEEN, _SEEN_ALSO
from tools.check_wheel import expected_files

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    extra: [Requirement(text) for text in texts]
    for extra, texts in PROJECT["optional-dependencies"].items()
}
INTERNALS = ("torch", "megatron-core", "megatron-fsdp", "transformer-engine")
DISTRIBUTIONS = {
    "megatron": "megatron-core",
    "transformer_engine_torch": "transformer-engine",
    "yaml": "pyyaml",
}
"""Where the name that is imported is not that of what is installed."""
INSIDE_CHECKOUT = {"megatron_cg"}
WITH_TORCH = {"triton"}
"""What torch's wheels for GPUs require themselves, in one exact version."""


def name_of(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def bounds(name: str) -> Requirement:
    every = [*NEEDED, *(item for items in EXTRAS.values() for item in items)]
    (found,) = [item for item in every if name_of(item) == name]
    return found


def pinned(file: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def imported() -> Iterator[tuple[str, Path]]:
    """Every distribution that the package's code names in an import, wherever in a file."""
    names_in_wheel = sorted(expected_files(ROOT / "megatron_cg"))
    for path in (ROOT / name for name in names_in_wheel if name.endswith(".py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                if name not in INSIDE_CHECKOUT | WITH_TORCH:
                    yield canonicalize_name(DISTRIBUTIONS.get(name, name)), path


def test_every_import_is_of_something_declared() -> None:
    declared = {name_of(item) for item in NEEDED}
    declared |= {name_of(item) for items in EXTRAS.values() for item in items}
    declared |= {canonicalize_name(one.name) for one in pinned("transformers.txt")}  # an example's
    unknown = {name: str(path) for name, path in imported() if name not in declared}
    assert unknown == {}


@pytest.mark.parametrize("name", INTERNALS)
def test_what_we_reach_into_has_an_upper_bound_and_what_was_measured_is_inside(name: str) -> None:
    assert any(item.operator in ("<", "<=") for item in bounds(name).specifier)
    seen = ".".join(map(str, _SEEN[name]))
    assert bounds(name).specifier.contains(seen)


@pytest.mark.parametrize("file", ["runtime.txt", "upstream.txt", "gpu.txt", "contract.txt"])
def test_what_is_tested_is_what_is_declared(file: str) -> None:
    for item in pinned(file):
        declared = bounds(name_of(item))
        exact = [clause.version for clause in item.specifier if clause.operator == "=="]
        assert all(declared.specifier.contains(version) for version in exact)
        assert exact or item.specifier == declared.specifier


def test_the_newest_torch_is_one_that_the_tape_has_run_and_no_default() -> None:
    (torch,) = pinned("newest.txt")
    (version,) = [clause.version for clause in torch.specifier]
    assert Version(version).release[:2] in _SEEN_ALSO["torch"]
    assert not bounds("torch").specifier.contains(version)
