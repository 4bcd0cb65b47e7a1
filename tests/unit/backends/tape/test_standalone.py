"""The standalone megatron_fsdp package under the fakes, in two processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.tools.cpu.launch import run_processes

pytest.importorskip("megatron_fsdp")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4).add(rank).sin()


def fit(directory: Path) -> None:
    """Three steps of the sharded network; writes this process's mean losses."""
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    model = fully_shard_model(
        network(),
        device_mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        calculate_per_token_loss=True,
    )
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs(dist.get_rank())).square().sum()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
    torch.save(torch.stack(losses), directory / f"{dist.get_rank()}.pt")


def test_two_processes_train_as_one_that_sees_all(tmp_path: Path) -> None:
    run_processes(partial(fit, tmp_path))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.cat([inputs(0), inputs(1)])).square().sum()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    assert expected[2] < expected[0] * 0.9
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=0.0)
