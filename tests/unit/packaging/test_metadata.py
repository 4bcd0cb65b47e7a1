"""pyproject.toml: one version, bounds that hold what is tested, imports; versions never seen."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_cg import __main__ as launcher
from megatron_cg.arguments.rules import _SEEN, unseen_versions
from megatron_cg.arguments.schema import Environment
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, megatron_parser
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
    assert {name: str(path) for name, path in imported() if name not in declared} == {}


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
    assert version in (ROOT / "docs" / "support.md").read_text("utf-8")
    assert not bounds("torch").specifier.contains(version)


def test_a_symbol_that_is_gone_ends_the_launcher_with_package_version_symbol_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megatron.training import arguments

    installed = {**GOOD_ENVIRONMENT.versions, "megatron-core": "0.20.0"}
    # Megatron, which asks for versions too, is to be imported with those that are there.
    megatron_parser()
    for module in ("upstream.symbols", "arguments.schema"):
        monkeypatch.setattr(f"megatron_cg.{module}.installed_version", installed.get)
    monkeypatch.delattr(arguments, "add_megatron_arguments")
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError('the script was run')")
    monkeypatch.setattr("sys.argv", ["megatron_cg", str(script)])
    with pytest.raises(SystemExit) as ended:
        launcher.main()
    message = str(ended.value)
    assert "megatron-core 0.20.0" in message
    assert "megatron.training.arguments:add_megatron_arguments" in message
    assert "megatron-cg doctor" in message


@pytest.mark.parametrize(
    ("package", "version", "is_told"),
    [
        ("torch", "2.11.0+cpu", False),
        ("torch", "2.14.1", True),
        ("torch", "odd", True),
        ("megatron-core", "0.19.2rc1", True),
    ],
)
def test_a_version_that_was_not_measured_is_told(package: str, version: str, is_told: bool) -> None:
    found = list(unseen_versions(Environment(versions={package: version})))
    assert [f"{package} {version} was not measured" in text for text in found] == [True] * is_told
