"""A rank that fails inside the comparison, while another may wait for it in a collective."""

from __future__ import annotations

import atexit
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.compiled import load as load_module
from megatron_cg.compiled.load import load
from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.consensus import process_exit
from megatron_cg.consensus.decision import AgreementError
from megatron_cg.consensus.exchange import Agreement
from tests.unit.ranks import on_ranks


class Row(nn.Module):
    """A linear layer whose results are added over a tensor-parallel group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.group = nn.Linear(8, 8, bias=False), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        y = self.linear(x)
        out: torch.Tensor = mappings.reduce_from_tensor_model_parallel_region(y, group=self.group)
        return out


def row(device: str = "meta") -> Region:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.device(device):
        return Region(Row(group), (torch.randn(3, 8, requires_grad=True),), {}, {"tp": group})


def fails(_region: object, _compiled: object) -> None:
    raise torch.OutOfMemoryError("forced")


def load_on_a_rank(folder: Path) -> str:
    """Both ranks fail before a collective of the comparison, so that none waits in this test."""
    load_module.first_difference = fails  # type: ignore[assignment]
    try:
        return str(load(folder, "row", row("cpu"), Agreement(), on_refusal="eager"))
    except AgreementError as error:
        atexit.unregister(process_exit._leave)
        return f"{error}; after {type(error.__cause__).__name__}"


def test_a_rank_that_others_may_wait_for_ends(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)  # As on the ranks.
    try:
        save(row, tmp_path, name="row", world_size=2, capability=None)
    finally:
        torch.use_deterministic_algorithms(False)
    for said in on_ranks(partial(load_on_a_rank, tmp_path)):
        assert said.startswith("this rank failed while row was compared with eager, and other")
        assert said.endswith("; after OutOfMemoryError")


def test_without_groups_it_is_a_refusal(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "first_difference", fails)
    region = Region(nn.Linear(2, 2), (torch.ones(1, 2),))
    found = load_module._compared("it", region, region.module)
    assert isinstance(found, torch.OutOfMemoryError)
