"""Two models in one process: Megatron-FSDP gathers their units into the same two buffers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg import graph_units
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.fastpath.params.shared_buffers import free_before_others
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


class Table:
    """Megatron-FSDP's table of buffers, which notes who took what."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def get_tensor(self, shape: Any, dtype: Any, name: str) -> str:
        self.taken.append(name)
        return name


class Pool:
    """Bucket 3 is in buffer 1; bucket 4 is in none."""

    def __init__(self) -> None:
        self.using_buffer = {3: ("weights", 1)}

    def _get_gbuf_name(self, name: str, number: int) -> str:
        return f"{name}-{number}"


class Store:
    def __init__(self) -> None:
        self.weight_alloc = Pool()


class Kept:
    def __init__(self, *buckets: int) -> None:
        self.buckets = list(buckets)
        self.freed_before: list[list[str]] = []

    def kept(self) -> list[int]:
        return self.buckets

    def give_way(self) -> None:
        self.freed_before.append(list(TABLE.taken))


TABLE = Table()


def get_global_memory_buffer() -> Table:
    return TABLE


@pytest.mark.parametrize(("buckets", "freed"), [((3,), True), ((4, 3), True), ((4,), False)])
def test_buckets_give_way_to_their_own_buffer_alone(buckets: tuple[int, ...], freed: bool) -> None:
    TABLE.taken.clear()
    store, kept = Store(), Kept(*buckets)
    undo = free_before_others(store, kept)
    assert TABLE.get_tensor((), None, "weights-0") == "weights-0" and kept.freed_before == []
    assert TABLE.get_tensor((), None, "weights-1") == "weights-1"
    assert kept.freed_before == ([["weights-0"]] if freed else [])
    undo()
    TABLE.get_tensor((), None, "weights-1")
    assert len(kept.freed_before) == freed


@pytest.mark.parametrize("gone", ["store", "kept"])
def test_a_model_that_is_let_go_gives_way_to_nobody(gone: str) -> None:
    held: dict[str, Any] = {"store": Store(), "kept": Kept(3)}
    undo = free_before_others(held["store"], held["kept"])
    del held[gone]
    gc.collect()
    assert TABLE.get_tensor((), None, "weights-1") == "weights-1"
    assert gone == "kept" or held["kept"].freed_before == []
    undo()
