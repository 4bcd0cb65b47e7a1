"""What a plan changes in its process, and that it is undone."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.plan.likeness.packages import TE_VERSION, install
from megatron_cg.plan.machine import HOPPER, simulated_gpus

MEGATRON = "megatron.core.extensions.transformer_engine"


def test_likenesses_are_put_in_and_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MEGATRON, raising=False)
    monkeypatch.setitem(sys.modules, "mamba_ssm", ModuleType("mamba_ssm"))
    before, compiler = dict(sys.modules), torch.compile
    undo = install()
    assert sys.modules["transformer_engine"].__version__ == TE_VERSION
    assert sys.modules["mamba_ssm"] is not before["mamba_ssm"]
    assert torch.compile is not compiler
    undo()
    assert sys.modules == before and torch.compile is compiler


def test_a_megatron_that_is_there_already_is_not_planned_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, MEGATRON, ModuleType(MEGATRON))
    before = dict(sys.modules)
    with pytest.raises(MegatronCGError, match="imported already"):
        install()
    assert sys.modules == before


def test_gpus_are_simulated_and_gone_afterwards() -> None:
    names = ("current_device", "get_device_capability", "Stream", "synchronize")
    before = [getattr(torch.cuda, name) for name in names]
    factory, environment = torch.empty, dict(os.environ)
    with pytest.raises(KeyError), simulated_gpus({"MEGATRON_CG_PLANNED": "1"}):
        assert torch.empty(2, device="cuda").device.type == "meta"
        assert torch.ones(2, device=torch.cuda.current_device()).device.type == "meta"
        assert torch.zeros(2).to("cuda").device.type == torch.zeros(2).cuda().device.type == "meta"
        assert torch.zeros(2).device.type == "cpu"
        assert torch.cuda.get_device_capability() == HOPPER
        os.environ["MEGATRON_SET"] = os.environ["MEGATRON_CG_PLANNED"]
        raise KeyError
    assert [getattr(torch.cuda, name) for name in names] == before
    assert torch.empty is factory and dict(os.environ) == environment
