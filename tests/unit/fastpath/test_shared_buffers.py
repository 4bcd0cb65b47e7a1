"""Two models in one process: Megatron-FSDP gathers their units into the same two buffers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg import graph_units
from megatron_cg.backends.tape.tape_backend import TapeBackend
from tests.unit.ranks import on_ranks

pytest.importorskip("megatron_fsdp")
FEATURES, STEPS = 8, 4
MODES = {"eager": None, "without the fast path": False, "with it": True}


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + hidden


class Network(nn.Module):
    """``before`` is called with the input before the first unit runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        self.layers = nn.ModuleList(Unit(width) for _ in range(3))
        self.before: Callable[[torch.Tensor], object] = lambda _x: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(x)
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def sharded(width: int) -> Any:
    from megatron_fsdp import fully_shard_model

    torch.manual_seed(width)
    return fully_shard_model(
        Network(width),
        fsdp_unit_modules=[Unit],
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=True,
        calculate_per_token_loss=True,
        sync_model_each_microbatch=False,
    )


def distilled(fast_path: bool | None, *, inside: bool) -> Any:
    """Losses and weights of a student, whose teacher runs in or after its forward pass.

    The teacher is larger, so that parameters outside of units have buffers of their own.
    """
    from megatron_fsdp import fully_shard_optimizer

    student, teacher = sharded(8), sharded(12)
    optimizer = fully_shard_optimizer(torch.optim.SGD(student.parameters(), lr=1e-3))
    graphs, targets = None, list[torch.Tensor]()
    if fast_path is not None:
        graphs = graph_units(
            student, "layers.*", warmup_steps=1, backend=TapeBackend(), fast_path=fast_path
        )

    def teach(x: torch.Tensor) -> None:
        with torch.no_grad():
            targets.append(teacher(x))

    if inside:
        student.module.before = teach
    losses = []
    for step in range(STEPS):
        with graphs.step() if graphs is not None else nullcontext():
            optimizer.zero_grad()
            for microbatch in range(3):
                seed = 10 * step + microbatch + dist.get_rank()
                x = torch.arange(3.0 * FEATURES).view(3, FEATURES).add(seed).sin()
                output = student(x)
                if not inside:
                    teach(x)
                loss = (output - targets.pop()).square().sum()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
    if graphs is not None:
        assert graphs.counters.replayed == 3 * 3 * (STEPS - 1)
        graphs.close()
    weights = [p.to_local().double().sum().item() for p in student.parameters()]
    return losses, weights


def distill_all() -> dict[str, Any]:
    return {
        f"{where}, {name}": distilled(fast_path, inside=where == "in")
        for where in ("in", "after")
        for name, fast_path in MODES.items()
    }


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_ranks(distill_all)


@pytest.mark.parametrize("where", ["in", "after"])
def test_a_teacher_that_runs_before_the_backward_pass_overwrites_no_weights(
    runs: list[dict[str, Any]], where: str
) -> None:
    for run in runs:
        assert run[f"{where}, without the fast path"] == run[f"{where}, eager"]
        assert run[f"{where}, with it"] == run[f"{where}, eager"]
