"""What scripts do with an optimizer whose functions the fast path has replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megatron_cg.fastpath.optimizer.adam import install_adam
from megatron_cg.tools.cpu.fakes import cpu_fakes

fused_adam = pytest.importorskip(
    "transformer_engine.pytorch.optimizers.fused_adam",
    reason="needs transformer-engine with its torch extension",
    exc_type=ImportError,
)


@pytest.fixture(autouse=True)
def fakes(one_rank: None) -> Iterator[None]:
    with cpu_fakes():
        yield


def scheduled(ours: bool) -> tuple[list[float], int]:
    """Rates that the kernel is given, by a scheduler made after some steps; how many are ours."""
    parameter, rates = nn.Parameter(torch.ones(3)), list[float]()
    adam = fused_adam.FusedAdam([parameter], lr=1.0)
    adam.multi_tensor_adam = lambda _chunk, _flag, _tensors, rate, *_: rates.append(rate)
    parameter.grad = torch.ones(3)
    adam.step()
    undo = install_adam([adam]) if ours else None
    local = adam.step
    adam.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
    for _ in range(3):
        adam.step()
        scheduler.step()
    if undo is not None:
        undo()
        assert "step" not in vars(adam)
    adam.step()
    assert adam.param_groups[0]["step"] == 6
    return rates, getattr(local, "steps", 0)


def test_a_scheduler_of_torch_can_be_made_while_a_step_is_ours() -> None:
    engines, _ = scheduled(False)
    ours, steps = scheduled(True)
    assert ours == engines == [1.0, 1.0, 1.0, 0.5, 0.25, 0.125]
    assert steps == 3
