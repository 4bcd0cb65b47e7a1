"""Symbols of other packages: how one is found, and that every module declares its own."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.tools.doctor import ask, relied_on
from megatron_cg.tools.doctor import symbol_checks as symbols
from megatron_cg.tools.doctor.finding import Level
from megatron_cg.tools.doctor.relied_on import look_up, modules_that_rely
from megatron_cg.upstream.symbols import Symbol
from tests.unit.tools.doctor.systems import ROOT, of_level, only, system

PACKAGE = ROOT / "megatron_cg"
TE_ONLY = ["megatron_cg.backends.te.gone", "megatron_cg.backends.te.te_replay_gone"]
TAPE_ONLY = ["megatron_cg.backends.tape.gone", "megatron_cg.tools.cpu.gone"]
NOT_YET = ("tools/bench/",)
"""Modules that look symbols up and do not declare them yet; they are not in the doctor's report."""


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module ``upstream`` with a function, a class, and functions inside functions."""
    module = types.ModuleType("upstream")

    def outer(first: int, second: int, *, third: int = 0) -> Any:
        def inner() -> None:
            def innermost() -> None: ...

            return innermost()

        return inner

    class Base:
        declared: int

    class Thing(Base):
        def __init__(self) -> None:
            self.assigned = 1

        def register(self, modules: list[Any]) -> Any:
            def hook(module: Any) -> None:
                module.state = "idle"

            return hook

        @property
        def computed(self) -> int:
            return 1

    vars(module).update(outer=outer, Thing=Thing, wrapped=functools.wraps(outer)(lambda: None))
    monkeypatch.setitem(sys.modules, "upstream", module)
    return module


def symbol(path: str, **expected: Any) -> Symbol:
    return Symbol("some-package", path, "for a test", **expected)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("upstream", {}),
        ("upstream:outer", {"parameters": ("first", "third")}),
        ("upstream:Thing", {"attributes": ("assigned", "declared", "computed", "state")}),
        ("upstream:Thing.register", {"parameters": ("modules",)}),
        ("upstream:outer.<locals>.inner", {}),
        ("upstream:outer.<locals>.inner.<locals>.innermost", {}),
        ("upstream:wrapped.<locals>.inner", {}),
    ],
)
def test_a_symbol_that_is_as_expected_is_found(
    upstream: types.ModuleType, path: str, expected: dict[str, Any]
) -> None:
    assert symbol(path, **expected).find() is not None


@pytest.mark.parametrize(
    ("path", "expected", "said"),
    [
        ("no_upstream", {}, "no_upstream"),
        ("upstream:gone", {}, "upstream:gone"),
        ("upstream:outer", {"parameters": ("third", "first")}, "third, first"),
        ("upstream:outer", {"parameters": ("fourth",)}, "fourth"),
        ("upstream:Thing", {"attributes": ("assigned", "gone")}, "Thing.gone"),
        ("upstream:outer.<locals>.gone", {}, "gone"),
        ("upstream:outer.<locals>.innermost", {}, "innermost"),
    ],
)
def test_a_symbol_that_is_not_names_package_and_symbol(
    upstream: types.ModuleType, path: str, expected: dict[str, Any], said: str
) -> None:
    with pytest.raises(UpstreamChangedError, match="some-package") as raised:
        symbol(path, **expected).find()
    assert said in str(raised.value)


def ours() -> Iterator[tuple[str, str]]:
    """Path below the package, and text, of each module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def test_a_module_that_looks_symbols_up_declares_them() -> None:
    declared = modules_that_rely()
    for name, text in ours():
        if name == "upstream/symbols.py" or name.startswith((*NOT_YET, "tools/doctor/")):
            continue
        if "lookup(" in text or (".find()" in text and "import Symbol" in text):
            module = "megatron_cg." + name.removesuffix(".py").replace("/", ".")
            assert module in declared, f"{name} has no RELIES_ON"


def test_each_backend_needs_the_modules_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relied_on, "modules_that_rely", lambda _: [*TE_ONLY, *TAPE_ONLY])
    native = TE_ONLY[:1]
    backends = (("transformer_engine", TE_ONLY), ("native", native), ("tape", TAPE_ONLY))
    for backend, mine in backends:
        assert [row["module"] for row in look_up(backend)] == mine


def test_a_missing_symbol_and_a_broken_module_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "relying"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text(
        "from megatron_cg.upstream.symbols import Symbol\n"
        "RELIES_ON = (Symbol('torch', 'torch:gone', 'a thing'), Symbol('torch', 'torch', 'it'),\n"
        "             Symbol('not-there', 'not_there', 'another'))\n"
    )
    (package / "two.py").write_text("import gone\nRELIES_ON = ()\n")
    (package / "three.py").write_text("RELIED = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = look_up("transformer_engine", package)
    assert [(row["symbol"], bool(row["error"]), row["skipped"]) for row in rows] == [
        ("torch:gone", True, False),
        ("torch", False, False),
        ("not_there", False, True),
        ("relying.two", True, False),
    ]
    found = list(symbols.relied_on(system({ask.SYMBOLS: rows})))
    assert len(of_level(found, Level.ERROR)) == 2
    assert "torch:gone" in found[0].found and "relying.one" in found[0].why
    assert "1 symbols of not-there" in only(found, Level.NOTE).found


def test_many_missing_symbols_are_ten_findings_and_one_for_the_rest() -> None:
    row = {"module": "m", "package": "p", "error": "gone", "skipped": False}
    rows = [row | {"symbol": f"s{number}"} for number in range(14)]
    found = of_level(symbols.relied_on(system({ask.SYMBOLS: rows})), Level.ERROR)
    assert len(found) == 11 and "4 more symbols: s10 s11 s12 s13" in found[-1].found


def test_a_te_that_cannot_be_imported_is_an_error() -> None:
    failed = {"error": "ImportError: undefined symbol", "loaded": {}}
    found = only(symbols.te_imports(system({ask.TE: failed})), Level.ERROR)
    assert "undefined symbol" in found.found
