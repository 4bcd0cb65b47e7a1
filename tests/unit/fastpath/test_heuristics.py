"""cuBLASLt remembers more where there are experts; its own library, which needs no GPU for that."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fastpath.gradients.detached_weights import MODULE
from megatron_cg.fastpath.heuristics import VARIABLE, capacity, install_heuristics
from megatron_cg.fastpath.not_applicable import NotApplicableError


class Experts(nn.Module):
    """A stub of TE's, which is not there without its extension."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model with experts somewhere in it."""
    module = ModuleType(MODULE)
    module.GroupedLinear = Experts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.delenv(VARIABLE, raising=False)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Experts()))


def remembered() -> int:
    """What cuBLASLt has as its capacity."""
    if torch.version.cuda is None:
        pytest.skip("this torch has no cuBLASLt")
    return capacity()


def test_more_is_remembered_until_that_is_undone(model: nn.Module) -> None:
    before = remembered()
    undo = install_heuristics(model, 2 * before)
    assert remembered() == 2 * before
    with pytest.raises(NotApplicableError, match=f"remembers {2 * before} problems"):
        install_heuristics(model, 2 * before)
    undo()
    assert remembered() == before
    undo = install_heuristics(model)
    assert remembered() > 20 * before
    undo()


def test_what_a_user_has_chosen_stays(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    before = remembered()
    monkeypatch.setenv(VARIABLE, "100")
    with pytest.raises(NotApplicableError, match=f"{VARIABLE} is set"):
        install_heuristics(model)
    assert remembered() == before


def test_without_experts_nothing_is_done(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    before = remembered()
    with pytest.raises(NotApplicableError, match="no grouped GEMM"):
        install_heuristics(nn.Linear(2, 2))
    monkeypatch.delitem(sys.modules, MODULE)
    with pytest.raises(NotApplicableError, match="no grouped GEMM"):
        install_heuristics(model)
    assert remembered() == before


def test_a_torch_without_cuda_or_another_cublas_is_said(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(NotApplicableError, match="without CUDA"):
        install_heuristics(model)
    monkeypatch.setattr(torch.version, "cuda", "9.1")
    with pytest.raises(NotApplicableError, match=r"libcublasLt\.so\.9 is not loaded"):
        install_heuristics(model)


def test_a_renamed_layer_of_experts_is_named(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules[MODULE], "GroupedLinear")
    with pytest.raises(UpstreamChangedError, match=r"transformer-engine.*GroupedLinear"):
        install_heuristics(model)
