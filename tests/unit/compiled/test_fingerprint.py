"""A fingerprint sees every change of what an artifact was made for."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.compiled.region import Region, differences, fingerprint
from megatron_cg.errors import PrecompileError


def region(**options: Any) -> Region:
    fields: dict[str, Any] = {"args": (torch.zeros(2, 4),)}
    return Region(torch.nn.Linear(4, 3), **{**fields, **options})


def test_what_it_has() -> None:
    found = fingerprint(region(kwargs={"mask": None, "pair": (1, torch.ones(2))}), (9, 0))
    assert found["device"] == "cuda 9.0" and found["version.torch"] == torch.__version__
    assert found["module"] == "torch.nn.modules.linear.Linear"
    assert found["parameter.weight"] == ("torch.float32 (3, 4) strides (4, 1), requires_grad")
    assert found["argument.0"] == "torch.float32 (2, 4) strides (4, 1)"
    assert found["argument.mask"] == "None" and found["argument.pair"] == "1"
    assert found["argument.pair.1"] == "torch.float32 (2,) strides (1,)"


def test_every_field_of_megatrons_configuration_is_in_it() -> None:
    from tests.unit.compiled.regions import config

    settings = config()
    found = fingerprint(region(config=settings), None)
    assert all(f"config.{field.name}" in found for field in dataclasses.fields(settings))
    assert not any(" at 0x" in text for text in found.values())
    assert found["config.params_dtype"] == "torch.float32"
    assert found["config.activation_func"].endswith("gelu>")


def test_the_order_of_a_set_is_not_in_it() -> None:
    one, other = ({"layers": layers} for layers in ({0, 8}, {8, 0}))
    assert str(one) != str(other)
    assert fingerprint(region(config=one), None) == fingerprint(region(config=other), None)


def in_eval() -> Region:
    changed = region()
    changed.module.eval()
    return changed


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (partial(region, args=(torch.zeros(2, 4).half(),)), "argument.0 was"),
        (partial(region, args=(torch.zeros(4, 2).t(),)), "argument.0 was"),
        (partial(region, kwargs={"scale": 2}), "argument.scale was absent and is 2"),
        (partial(region, config={"width": [8, None]}), "config.width was absent and is [8, None]"),
        (in_eval, "module.training was True and is False"),
    ],
)
def test_a_change_is_named(other: Callable[[], Region], name: str) -> None:
    assert name in differences(fingerprint(region(), None), fingerprint(other(), None))


def test_modes_of_the_process_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(region(), None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "other")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lines = differences(before, fingerprint(region(), None))
        on_gpus = fingerprint(region(), (9, 0))
    assert lines.startswith("autocast was off and is torch.bfloat16; deterministic was ")
    assert "other" in lines
    assert differences(fingerprint(region(), (9, 0)), on_gpus) == ""


def test_many_differences_are_counted() -> None:
    lines = differences(dict.fromkeys("abcdefg", "1"), {})
    assert lines.startswith("a was 1 and is absent; b was") and lines.endswith("; and 2 more")


def test_tensors_on_several_devices_are_refused() -> None:
    with pytest.raises(PrecompileError, match="cpu, meta"):
        region(args=(torch.zeros(2, 4, device="meta"),)).device()
