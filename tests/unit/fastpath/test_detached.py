"""Weights that autograd does not see, and those that it must."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.capture.accumulators import forget_accumulators
from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights, detach_in
from tests.unit.ranks import on_ranks

pytest.importorskip("megatron_fsdp")

PARTS, WIDTH, STEPS = 6, 4, 3


class _Grouped(torch.autograd.Function):
    """Rows in equal shares, each share times a weight of its own; one node for all weights."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        context.save_for_backward(rows, *weights)
        shares = zip(rows.chunk(len(weights)), weights, strict=True)
        return torch.cat([share @ weight.t() for share, weight in shares]), None

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, _other: None) -> Any:
        rows, *weights = context.saved_tensors
        shares = gradient.chunk(len(weights))
        back = torch.cat([g @ weight for g, weight in zip(shares, weights, strict=True)])
        into = rows.chunk(len(weights))
        return (back, *[g.t() @ share for g, share in zip(shares, into, strict=True)])


class Grouped(nn.Module):
    """Some experts, as a grouped GEMM has them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARTS):
            weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        apply: Callable[..., Any] = _Grouped.apply
        output, nothing = apply(rows, *self._parameters.values())
        return output, nothing


class Layer(nn.Module):
    """An FSDP unit: a dense part and experts; ``way`` says how the experts are called."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.dense, self.grouped, self.way = nn.Linear(WIDTH, WIDTH), Grouped(), way

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.dense(rows).tanh()
        if self.way == "recompute":
            output: torch.Tensor = checkpoint(
                lambda x: self.grouped(x)[0], rows, use_reentrant=True
            )
            return output
        penalty: torch.Tensor | float = 0.0
        if self.way in ("used before", "renewed"):
            for weight in list(self.grouped.parameters())[1::2]:
                penalty = penalty + weight.square().sum() * 1e-2
        if self.way == "twice":
            rows = self.grouped(rows)[0].tanh()
        output = self.grouped(rows)[0]
        if self.way == "used beside":
            # As a penalty on weights is: a second use, and other gradients, of some of them.
            for weight in list(self.grouped.parameters())[1::2]:
                output = output + (weight.square().sum() * 1e-2)
        return output + penalty


WAYS = {
    "once": 2 * STEPS * 2,
    "recompute": 2 * STEPS * 2,
    # Handed over once, as the sum of both.
    "twice": 2 * STEPS * 2,
    "used beside": 2 * STEPS * 2,
    "used before": 2 * STEPS * 2,
    "graphed": 0,
    "hooked": 0,
}
"""Passes of the experts whose gradients are handed over together."""


def fit(way: str, fast: bool) -> dict[str, Any]:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_cg import fastpath as fast_path
    from megatron_cg.fastpath.gradients.bucketing import GradientBucketing

    torch.manual_seed(0)
    taken: list[int] = []
    model: Any = fully_shard_model(
        nn.Sequential(Layer(way), Layer(way), nn.Linear(WIDTH, 1)),
        device_mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        calculate_per_token_loss=True,
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=True,
    )
    if way == "hooked":
        for parameter in model.param_and_grad_buffer.params:
            parameter.register_hook(lambda gradient: gradient * 2)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.003))
    function, place = _Grouped, sys.modules[Grouped.__module__]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        taking = counted(GradientBucketing.take_detached, taken)
        patch.setattr(GradientBucketing, "take_detached", taking)
        losses = []
        for step in range(STEPS + 1):
            if fast and step == 1:
                path = fast_path.install(model)
                undo.callback(path.close)
                assert path.bucketing is not None and "gradients" in path.parts
                graphed = set(model.modules()) if way == "graphed" else set()
                detached = DetachedWeights(model.module, path.bucketing, graphed)
                undo.callback(detach_in(place, "_Grouped", detached))
                assert _Grouped is not function
            optimizer.zero_grad()
            if fast and step == 2 and way == "renewed":
                raw: Any = SimpleNamespace(parameters=lambda: model.param_and_grad_buffer.params)
                forget_accumulators([raw])
                with pytest.raises(FastPathError, match="--cg-no-fsdp-fast-path"):
                    one_step(model, step)
                break
            losses += one_step(model, step)
            optimizer.step()
    assert _Grouped is function
    return {"losses": losses, "taken": taken}


def counted(take: Callable[..., Any], taken: list[int]) -> Callable[..., Any]:
    def counting(bucketing: Any, weights: Any, *rest: Any, **how: Any) -> None:
        taken.append(len(weights.weights))
        take(bucketing, weights, *rest, **how)

    return counting


def one_step(model: Any, step: int) -> list[float]:
    """Two microbatches; their losses."""
    rows = torch.arange(2.0 * PARTS * WIDTH).reshape(2 * PARTS, WIDTH)
    found = [(rows * (1 + number) + dist.get_rank() + step).sin() for number in range(2)]
    losses = []
    for x in found:
        losses.append(model(x.requires_grad_()).square().sum())
        losses[-1].backward()
    return [loss.item() for loss in losses]


def fit_all() -> dict[str, Any]:
    found = {way: {name: fit(way, name == "fast") for name in ("eager", "fast")} for way in WAYS}
    fit("renewed", True)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(fit_all)


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_megatron_fsdp_alone(results: list[dict[str, Any]], way: str) -> None:
    for found in results:
        runs = found[way]
        assert runs["fast"]["losses"] == runs["eager"]["losses"]
        assert runs["fast"]["losses"][-1] < runs["fast"]["losses"][0]
        assert runs["eager"]["taken"] == []
        assert runs["fast"]["taken"] == [PARTS] * WAYS[way]
