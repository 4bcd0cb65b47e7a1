"""Weight gradients of experts that are computed after the layer's backward pass.

``--overlap-dispatch-backward-with-experts-wgrad``, with Transformer Engine's own store of what is
left to compute, and experts that use it as Transformer Engine's do.
"""

from __future__ import annotations

import ast
import queue
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packaging.version import Version

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.backends.tape.tape_memory import FreedStorageError
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu import cpu_model, grouped_linear
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.moe.test_training import DROP_AND_PAD
from tests.unit.te_sources import source_of_te
from tests.unit.trainers import trainer_of

STEPS, WARMUP, LAYERS = 3, 1, 2
GEMMS = 2 * LAYERS
"""Grouped ones, of a pass."""
STORE_AT = 4
"""The place of the store among the settings of a grouped GEMM."""
DELAYED = {"overlap_dispatch_backward_with_experts_wgrad": True}


def store_of_te() -> Any:
    """Transformer Engine's ``WeightGradStore(True)``, from its sources."""
    file = source_of_te("module", "_common.py")
    tree = ast.parse(file.read_text())
    (found,) = [one for one in tree.body if getattr(one, "name", "") == "WeightGradStore"]
    scope: dict[str, Any] = {"queue": queue, "torch": torch}
    exec(compile(ast.Module([found], []), file.name, "exec"), scope)
    return scope["WeightGradStore"](True)


class Delaying(grouped_linear._GroupedLinear):
    """Puts the GEMMs of weight gradients into the store, and returns no gradients of weights."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        ctx.store = given[2][STORE_AT]
        return grouped_linear._GroupedLinear.forward(ctx, *given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        now = grouped_linear._GroupedLinear.backward(ctx, *gradients)
        rows, *weights = ctx.saved_tensors

        def compute(rows: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
            into = zip(gradient.split(ctx.splits), rows.split(ctx.splits), strict=True)
            return [part.t() @ share for part, share in into]

        ctx.store.put([rows, gradients[0]], compute)
        return (*now[: len(now) - len(weights)], *[None] * len(weights))


class DelayedLinear(grouped_linear.GroupedLinear):
    """Experts with a store."""

    computed = 0
    """Calls of ``backward_dw`` that found something to compute, in all layers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wgrad_store = store_of_te()
        for weight in self.parameters():
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def need_backward_dw(self) -> bool:
        return bool(self.wgrad_store.delay_wgrad_compute())

    def forward(self, rows: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        splits = torch.as_tensor(m_splits, dtype=torch.int64)
        settings = [*grouped_linear.SETTINGS]
        settings[STORE_AT] = self.wgrad_store
        function: Any = Delaying
        made, _ = function.apply(rows, splits, settings, None, None, *self.parameters())
        return made, None

    def backward_dw(self) -> None:
        if self.wgrad_store.context.empty():
            return
        DelayedLinear.computed += 1
        gradients, _ = self.wgrad_store.pop()
        for weight, gradient in zip(self.parameters(), gradients, strict=True):
            weight.grad = gradient


@pytest.fixture(autouse=True)
def delayed(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> Iterator[None]:
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.20.2"))
    monkeypatch.setattr(DelayedLinear, "computed", 0)
    yield


def train(*, delays: bool, scopes: tuple[str, ...] = ()) -> list[list[str]]:
    """Losses and norms of three steps, to the last bit; with scopes, two of them by graphs."""
    options = {**DROP_AND_PAD, **(DELAYED if delays else {})}
    shape = CpuModelConfig(
        layers=LAYERS, experts=4, grouped=True, options=options, graph_modules=scopes or ("attn",)
    )
    kind = DelayedLinear if delays else grouped_linear.GroupedLinear
    numbers = []
    with (
        patch.object(cpu_model, "GroupedLinear", kind),
        trainer_of(shape, graphs=bool(scopes)) as trainer,
    ):
        for step in range(STEPS):
            if scopes and step == WARMUP:
                trainer.capture(TapeBackend(), policy=ReplayPolicy("eager"))
            numbers.append([number.hex() for number in trainer.step()])
        if scopes:
            expect(trainer.session.counters, replayed=LAYERS * (STEPS - WARMUP), mismatched=0)
    return numbers


def test_beside_graphs_of_routers_gradients_are_those_of_eager() -> None:
    plain = train(delays=False)
    assert train(delays=True) == plain
    assert DelayedLinear.computed == GEMMS * STEPS
    assert train(delays=True, scopes=("attn", "moe_router")) == plain
    # As often as in an eager run, and once more in the capture.
    assert DelayedLinear.computed == 2 * GEMMS * STEPS


@pytest.mark.refuses("experts-delayed-gradients")
def test_a_replay_reads_a_gradient_that_was_freed(replays_alone: None) -> None:
    """Of experts in a graph: it computed and stored it outside of what autograd returns."""
    with pytest.raises(FreedStorageError):
        train(delays=True, scopes=("attn", "moe"))
