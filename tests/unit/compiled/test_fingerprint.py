"""A fingerprint has every field of a configuration, and sees every change."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cg.compiled.fingerprint import differences, fingerprint, short
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.sources import changed_sources
from megatron_cg.errors import PrecompileError


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Inner:
    width: int = 8


@dataclasses.dataclass
class Settings:
    inner: Inner = dataclasses.field(default_factory=Inner)
    dtype: torch.dtype = torch.float32
    kind: Kind = Kind.ONE
    function: Callable[..., Any] = torch.nn.functional.gelu
    bound: Any = dataclasses.field(default_factory=lambda: partial(sorted, reverse=True))
    parts: tuple[str, ...] = ("attn", "mlp")
    table: dict[str, int] = dataclasses.field(default_factory=lambda: {"rows": 3})
    thing: object = dataclasses.field(default_factory=object)


def region(**options: Any) -> Region:
    module = torch.nn.Linear(4, 3)
    fields: dict[str, Any] = {"args": (torch.zeros(2, 4),), "config": Settings()}
    return Region(module, **{**fields, **options})


def test_every_field_is_in_it() -> None:
    found = fingerprint(region(), (9, 0))
    assert {name: text for name, text in found.items() if name.startswith("config.")} == {
        "config.inner.width": "8",
        "config.dtype": "torch.float32",
        "config.kind": "Kind.ONE",
        "config.function": found["config.function"],
        "config.bound": "builtins.sorted",
        "config.parts": "[attn, mlp]",
        "config.table.rows": "3",
        "config.thing": "builtins.object",
    }
    assert found["config.function"].endswith("gelu")
    assert found["device"] == "cuda 9.0" and found["version.torch"] == torch.__version__
    assert found["parameter.weight"] == ("torch.float32 (3, 4) strides (4, 1), requires_grad")
    assert found["argument.0"] == "torch.float32 (2, 4) strides (4, 1)"
    assert fingerprint(region(), (9, 0)) == found


def test_every_field_of_megatrons_configuration_is_in_it() -> None:
    from tests.unit.compiled.regions import config

    settings = config()
    found = fingerprint(region(config=settings), None)
    for field in dataclasses.fields(settings):
        assert (
            any(
                name == f"config.{field.name}" or name.startswith(f"config.{field.name}.")
                for name in found
            )
            or getattr(settings, field.name) == {}
        )
    assert not any(" at 0x" in text for text in found.values())


def in_eval() -> Region:
    found = region()
    found.module.eval()
    return found


def frozen() -> Region:
    found = region()
    found.module.requires_grad_(False)
    return found


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (partial(region, config=Settings(inner=Inner(9))), "config.inner.width was 8 and is 9"),
        (partial(region, config=Settings(table={"columns": 3})), "config.table.rows was 3 and is"),
        (partial(region, args=(torch.zeros(2, 4).half(),)), "argument.0 was"),
        (partial(region, args=(torch.zeros(4, 2).t(),)), "argument.0 was"),
        (partial(region, kwargs={"scale": 2}), "argument.scale was absent and is 2"),
        (in_eval, "module.training was True and is False"),
        (frozen, "parameter.weight was"),
    ],
)
def test_a_change_is_named(other: Callable[[], Region], name: str) -> None:
    lines = differences(fingerprint(region(), None), fingerprint(other(), None))
    assert any(name in line for line in lines)


def test_a_change_of_the_devices_capability_is_named() -> None:
    lines = differences(fingerprint(region(), (9, 0)), fingerprint(region(), (10, 0)))
    assert lines == ["device was cuda 9.0 and is cuda 10.0"]


def test_numerics_flags_are_in_it() -> None:
    before = fingerprint(region(), None)
    old = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    try:
        torch.use_deterministic_algorithms(not old[0])
        torch.set_float32_matmul_precision("medium")
        lines = differences(before, fingerprint(region(), None))
    finally:
        torch.use_deterministic_algorithms(old[0])
        torch.set_float32_matmul_precision(old[1])
    named = {line.partition(" was ")[0] for line in lines}
    assert {"numerics.deterministic", "numerics.matmul precision"} <= named


def test_many_differences_are_counted() -> None:
    assert short(list("abc"), 2) == "a; b; and 1 more" and short(["a"]) == "a"


def test_tensors_on_several_devices_are_refused() -> None:
    with pytest.raises(PrecompileError, match="cpu, meta"):
        region(args=(torch.zeros(2, 4, device="meta"),)).device()


def test_edited_source_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "traced_by_test.py"
    file.write_text("def f():\n    return 1\n\ndef g():\n    return 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("traced_by_test")
    try:
        digest = sha256(b"def f():\n    return 1\n").hexdigest()
        assert changed_sources([("traced_by_test", 1, 3, digest)]) == []
        found = changed_sources([("traced_by_test", 4, 6, digest), ("no.module", 1, 2, digest)])
        assert found == [
            "lines 4 to 5 of traced_by_test are different",
            "no.module is not imported",
        ]
    finally:
        del sys.modules["traced_by_test"]


def test_autocast_of_the_device_is_part_of_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, on_gpus = fingerprint(region(), None), fingerprint(region(), (9, 0))
    assert differences(fingerprint(region(), None), under) == [
        "numerics.autocast was off and is torch.bfloat16"
    ]
    assert not differences(fingerprint(region(), (9, 0)), on_gpus)
