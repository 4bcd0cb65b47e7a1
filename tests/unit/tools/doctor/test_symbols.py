"""Symbols of other packages: how one is found, and that every module declares its own."""

import functools
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.arguments.schema import NATIVE, TAPE, TRANSFORMER_ENGINE
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.tools.doctor import checks
from megatron_cg.tools.doctor.checks import look_up, modules_that_rely
from megatron_cg.upstream.symbols import Symbol

PACKAGE = Path(checks.__file__).parents[2]


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
    return Symbol(path, "for a test", **expected)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("upstream", {}),
        ("upstream:outer", {"parameters": ("first", "third")}),
        ("upstream:Thing", {"attributes": ("assigned|gone", "old|declared", "computed", "state")}),
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
        ("upstream:Thing", {"attributes": ("assigned", "gone|old")}, "Thing.gone|old"),
        ("upstream:outer.<locals>.gone", {}, "gone"),
        ("upstream:outer.<locals>.innermost", {}, "innermost"),
    ],
)
def test_a_symbol_that_is_not_names_package_and_symbol(
    upstream: types.ModuleType, path: str, expected: dict[str, Any], said: str
) -> None:
    with pytest.raises(UpstreamChangedError, match="upstream") as raised:
        symbol(path, **expected).find()
    assert said in str(raised.value)


def test_a_module_that_looks_symbols_up_declares_them() -> None:
    declared = modules_that_rely()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text()
        if name.startswith(("upstream/symbols.py", "upstream/patch.py", "tools/doctor/")):
            continue
        if "lookup(" in text or (".find()" in text and "import Symbol" in text):
            module = "megatron_cg." + name.removesuffix(".py").replace("/", ".")
            assert module in declared, f"{name} has no RELIES_ON"


def test_each_backend_needs_the_modules_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    of_te, of_tape = ["megatron_cg.backends.te_gone"], ["megatron_cg.tape.gone"]
    monkeypatch.setattr(checks, "modules_that_rely", lambda _: [*of_te, *of_tape])
    for backend, mine in ((TRANSFORMER_ENGINE, of_te), (NATIVE, []), (TAPE, of_tape)):
        assert [row["module"] for row in look_up(backend)] == mine
    assert not [row for row in look_up(TAPE) if row["package"] == "transformer-engine"]
