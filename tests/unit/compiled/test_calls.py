"""What an artifact was made for, calls for which it was not, and modules that changed since."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.compiled.load import Precompiled
from megatron_cg.compiled.region import Region, differences, fingerprint
from megatron_cg.errors import PrecompileError, ReplayMismatchError


def region(**options: Any) -> Region:
    fields: dict[str, Any] = {"args": (torch.zeros(2, 4),)}
    return Region(torch.nn.Linear(4, 3), **{**fields, **options})


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
        (partial(region, kwargs={"pair": (None, 1)}), "argument.pair.1 was absent and is 1"),
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
    assert "device was cpu and is cuda 9.0" in differences(before, on_gpus)


def test_tensors_on_several_devices_are_refused() -> None:
    with pytest.raises(PrecompileError, match="cpu, meta"):
        region(args=(torch.zeros(2, 4, device="meta"),)).device()


class Loaded:
    """A module, its argument, code in place of it, and how often that code ran."""

    def __init__(self) -> None:
        self.module, self.given = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
        self.given.requires_grad_()
        self.calls = 0
        self.code = Precompiled(self.run, Region(self.module, (self.given,)), "layer")

    def run(self, module: Any, given: torch.Tensor) -> Any:
        self.calls += 1
        return module[0](given)


def under_autocast(it: Loaded) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        it.code(it.module, it.given)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda it: it.code(it.module, it.given[:1]), "argument.0 was torch.float32 (2, 4)"),
        (lambda it: it.code(it.module, it.given.double()), "is torch.float64 (2, 4)"),
        (lambda it: it.code(it.module, it.given.detach()), "strides (4, 1), requires_grad and is"),
        (lambda it: it.code(it.module, it.given, mask=None), "argument.mask was absent and is No"),
        (under_autocast, "autocast was off and is torch.bfloat16"),
        (lambda it: it.code.attach([it.module, nn.Linear(3, 4)]), "parameter.bias was absent"),
    ],
    ids=["shape", "dtype", "autograd", "keyword", "autocast", "module"],
)
def test_what_it_was_not_compiled_for_is_refused(call: Callable[[Loaded], Any], text: str) -> None:
    it = Loaded()
    with pytest.raises(ReplayMismatchError) as error:
        call(it)
    assert text in str(error.value)
    assert it.calls == 0 and "forward" not in vars(it.module)


def test_a_module_in_the_other_mode_runs_its_own_forward() -> None:
    it = Loaded()
    undo = it.code.attach([it.module])
    it.module.eval()(it.given)
    assert it.calls == 0
    it.module.train()(it.given)
    assert it.calls == 1
    undo()
    it.module(it.given)
    assert it.calls == 1


def test_a_hook_that_comes_after_attach_is_not_lost() -> None:
    it = Loaded()
    it.code.attach([it.module])
    ran: list[int] = []
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        handle = getattr(it.module[0], f"register_{register}_hook")(lambda *_: ran.append(1))
        with pytest.raises(ReplayMismatchError, match=r"Linear inside has the hook .* fsdp_unit"):
            it.module(it.given)
        handle.remove()
    it.module.register_forward_hook(lambda *_: ran.append(2))
    it.module(it.given)
    assert ran == [2]


def test_a_module_that_was_replaced_after_attach_is_not_passed_over() -> None:
    it = Loaded()
    it.code.attach([it.module])
    it.module[0] = nn.Linear(4, 4)
    with pytest.raises(ReplayMismatchError, match="inside this Sequential was replaced after att"):
        it.module(it.given)
