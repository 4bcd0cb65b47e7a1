"""Detached weights: the numbers of Megatron-FSDP alone, or an error, where passes are unusual."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.errors import FastPathError
from megatron_cg.fastpath.gradients.detached_weights import DetachedWeights, detach_in
from tests.unit.fastpath.bucketing_doubles import Bucketing, hook_weights
from tests.unit.ranks import on_ranks

pytest.importorskip("megatron_fsdp")

PARTS, WIDTH = 6, 4


class _Grouped(torch.autograd.Function):
    """Rows in equal shares, each share times a weight of its own."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, *weights: torch.Tensor) -> Any:
        context.save_for_backward(rows, *weights)
        shares = zip(rows.chunk(len(weights)), weights, strict=True)
        return torch.cat([share @ weight.t() for share, weight in shares])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        rows, *weights = context.saved_tensors
        shares = list(zip(gradient.chunk(len(weights)), rows.chunk(len(weights)), strict=True))
        back = torch.cat([g @ weight for (g, _), weight in zip(shares, weights, strict=True)])
        found = [(g.t() @ share).to(Grouped.gradients) * Grouped.factor for g, share in shares]
        if Grouped.neighbours:
            found = list(torch.stack(found))
        return back, *(None if n in Grouped.without else one for n, one in enumerate(found))


class Grouped(nn.Module):
    """Some experts, as a grouped GEMM has them."""

    gradients = torch.float32
    factor = 1.0
    """Of the weights' gradients."""
    neighbours = False
    """Whether these are pieces of one tensor."""
    without: tuple[int, ...] = ()
    """Places of weights that get none."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARTS):
            weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., Any] = _Grouped.apply
        output: torch.Tensor = apply(rows, *self._parameters.values())
        return output


class Layer(nn.Module):
    """An FSDP unit whose experts are called in the way that ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.refuses = way, False
        self.dense = nn.Linear(WIDTH, WIDTH)
        if way in OF_THEIR_OWN:
            # By this name Megatron-FSDP knows experts, and gives them buckets of their own.
            self.experts = nn.ModuleDict({"grouped": Grouped()})
        else:
            self.grouped = Grouped()
        if way == "neighbours":
            self.second = Grouped()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.way == "experts first":
            first: torch.Tensor = self.dense(self.all_experts()(rows).tanh())
            return first
        if self.way == "dense again":
            rows = checkpoint(self.dense, rows, use_reentrant=True).tanh()
            rows = checkpoint(self.dense, rows, use_reentrant=True).tanh()
        else:
            rows = self.dense(rows).tanh()
        if self.refuses and self.way == "failed late":
            rows.register_hook(refuse)
        if self.way in CALLED_OFTEN:
            rows = self.called_often(rows)
        output: torch.Tensor = self.call(rows, self.way == "again")
        if self.way == "neighbours":
            output = self.second(output.tanh())
        if self.refuses and self.way == "failed early":
            output.register_hook(refuse)
        return output

    def called_often(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.call(rows, self.way == "again").tanh()
        if self.refuses and self.way == "failed":
            rows.register_hook(refuse)
        if self.way == "recomputed between":
            rows = self.call(rows, True).tanh()
        return rows

    def call(self, rows: torch.Tensor, recompute: bool) -> torch.Tensor:
        if not recompute and self.way != "evaluated":
            output: torch.Tensor = self.all_experts()(rows)
            return output
        found: torch.Tensor = checkpoint(self.all_experts(), rows, use_reentrant=recompute)
        return found

    def all_experts(self) -> Any:
        return self.experts["grouped"] if self.way in OF_THEIR_OWN else self.grouped


def refuse(_: torch.Tensor) -> None:
    raise ValueError("refused")


def double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


WAYS = {
    "penalty outside": "own hooks run before Megatron-FSDP's root hook begins the pass",
    "hooked late": "a tensor hook is registered between forward and backward",
    "by name": "backward(inputs=weights) asks for what autograd does not see",
    "failed": "a pass that failed left gradients to wait",
    "failed early": "a pass that failed left buckets that are complete",
    "failed late": "a pass that failed left a bucket that is not complete",
    "evaluated": "forward passes without a backward pass come between, others are recomputed",
    "experts first": "the dense part's gradients wait as the experts complete the bucket",
    "neighbours": "gradients are pieces of one tensor, of two operations with one bucket",
    "alone": "no other rank has a part of the experts' gradients, which are summed up",
    "again": "a bucket that is complete gets gradients once more in the same pass",
    "dense again": "the dense part completes the bucket, and gets gradients once more",
    "recomputed between": "a call has a pass of its own, between two that have one together",
    "no gradient": "some weights get none",
    "given before": "a weight has a gradient before the pass",
    "checked": "Megatron-FSDP looks at each gradient for NaN",
}
LOUD = {"hooked late", "by name", "failed", "failed early", "failed late", "again"}
"""Those that end in an error of the fast path's."""
CALLED_OFTEN = {"failed", "again", "recomputed between"}
OF_THEIR_OWN = {"alone", "again"}
HALFWAY = 2
"""The step in which a pass fails."""


def backward(way: str, model: Any, layers: list[Layer], loss: torch.Tensor) -> None:
    if way == "penalty outside":
        weights = [w for layer in layers for w in [*layer.grouped.parameters()][1::2]]
        model.all_gather_and_wait_parameters_ready(weights, prefetch=False)
        loss = loss + torch.stack([weight.sum() for weight in weights]).sum() * 0.3
    hooks = []
    for layer in layers:
        if way == "hooked late":
            hooks.append(layer.grouped.get_parameter("weight1").register_hook(double))
        if way == "given before":
            layer.grouped.get_parameter("weight1").grad = torch.ones(WIDTH, WIDTH)
    if way == "by name":
        loss.backward(inputs=list(model.param_and_grad_buffer.params))
    else:
        loss.backward()
    for hook in hooks:
        hook.remove()


def sharded(way: str, layers: list[Layer]) -> Any:
    from megatron_fsdp import fully_shard_model
    from torch.distributed.device_mesh import init_device_mesh

    names = ("ep", "dp", "tp")
    experts: Any = init_device_mesh(
        "cuda", (2, 1, 1) if way == "alone" else (1, 2, 1), mesh_dim_names=names
    )
    model: Any = fully_shard_model(
        nn.Sequential(*layers, nn.Linear(WIDTH, 1)),
        device_mesh=init_device_mesh("cuda", (2, 1), mesh_dim_names=names[1:]),
        expt_device_mesh=experts[names[1:]] if way in OF_THEIR_OWN else None,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        calculate_per_token_loss=True,
        report_nan_in_param_grad=way == "checked",
    )
    model.set_model_auto_sync(False)
    return model


def fit(way: str, fast: bool) -> list[str]:
    """Losses; those up to an error, and its name, where there is one."""
    from megatron_fsdp import fully_shard_optimizer

    from megatron_cg import fastpath as fast_path

    torch.manual_seed(0)
    layers = [Layer(way), Layer(way)]
    model = sharded(way, layers)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.003))
    found: list[str] = []
    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grouped, "neighbours", way in {"neighbours", "alone"})
        patch.setattr(Grouped, "without", (1, PARTS - 1) if way == "no gradient" else ())
        for step in range(3):
            if fast and step == 1:
                path = fast_path.install(model)
                undo.callback(path.close)
                assert path.bucketing is not None
                detached = DetachedWeights(model.module, path.bucketing)
                undo.callback(detach_in(sys.modules[__name__], "_Grouped", detached))
            optimizer.zero_grad()
            if step == HALFWAY:
                fail(way, model, layers, patch)
            for microbatch in range(2):
                try:
                    loss = model(given_to(step + 4 * microbatch)).square().sum()
                    found.append(repr(loss.item()))
                    backward(way, model, layers, loss)
                except (FastPathError, ValueError) as error:
                    return [*found, type(error).__name__]
            if way == "evaluated":
                with torch.no_grad():
                    found.append(repr(model(given_to(0)).sum().item()))
                model.synchronize_param_gather()
            model.finish_grad_sync()
            optimizer.step()
    return found


def given_to(number: int) -> torch.Tensor:
    rows = torch.arange(2.0 * PARTS * WIDTH).reshape(2 * PARTS, WIDTH) + dist.get_rank()
    return (rows * (1 + number)).sin().requires_grad_()


def fail(way: str, model: Any, layers: list[Layer], patch: pytest.MonkeyPatch) -> None:
    """Let a pass fail, if that is the way, or let one that follows have what it must not."""
    if way == "checked":
        patch.setattr(Grouped, "factor", torch.inf)
    if way.startswith("failed"):
        layers[0].refuses = True
        with pytest.raises(ValueError, match="refused"):
            model(given_to(0)).square().sum().backward()
        layers[0].refuses = False


def fit_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        try:
            found[way] = [fit(way, False), fit(way, True)]
        except Exception as error:
            # A failure of its own, that says nothing of the others.
            found[way] = [[], [repr(error)]]
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(fit_all)


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_the_same_or_there_is_an_error(results: list[dict[str, Any]], way: str) -> None:
    for found in results:
        eager, fast = found[way]
        loud = fast[-1] == FastPathError.__name__
        until = len(fast) - loud
        assert fast[:until] == eager[:until] and loud == (way in LOUD), WAYS[way]
        assert len(fast) == len(eager) or loud
        assert (eager[-1] == ValueError.__name__) == (way == "checked")


class Owner(Bucketing):
    """Knows one module's parameters only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters = set(module.parameters())

    def knows(self, parameter: object) -> bool:
        return parameter in self.parameters


def grouped() -> Any:
    torch.manual_seed(0)
    module = Grouped()
    hook_weights(module.parameters())
    return module


def given() -> torch.Tensor:
    return torch.arange(float(PARTS * WIDTH)).reshape(PARTS, WIDTH).sin().requires_grad_()


def detach(module: nn.Module, bucketing: Any) -> Callable[[], None]:
    detached = DetachedWeights(nn.Sequential(module), bucketing)
    return detach_in(sys.modules[__name__], "_Grouped", detached)


def test_a_weight_that_was_frozen_at_first_gets_its_gradient() -> None:
    module = grouped()
    bucketing = Owner(module)
    module.weight1.requires_grad_(False)
    undo = detach(module, bucketing)
    try:
        module(given()).sum().backward()
        module.weight1.requires_grad_(True)
        module(given()).sum().backward()
    finally:
        undo()
    assert module.weight1.grad is not None or len(bucketing.taken[-1][0]) == PARTS


def test_gradients_are_cast_before_they_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grouped, "gradients", torch.bfloat16)
    module = grouped()
    bucketing = Owner(module)

    def loss() -> torch.Tensor:
        found: torch.Tensor = module(given()).square().sum()
        second: torch.Tensor = module(given() * 0.37).sin().sum()
        return found + second

    loss().backward()
    expected = [weight.grad for weight in module.parameters()]
    undo = detach(module, bucketing)
    try:
        loss().backward()
    finally:
        undo()
    ((found, _),) = bucketing.taken
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.to(theirs.dtype), theirs)


def test_a_model_that_is_between_two_steps_as_another_runs_is_detached_later() -> None:
    first, second = grouped(), grouped()
    ours, theirs = Owner(first), Owner(second)
    raw = dict(second._parameters)
    # As Megatron-FSDP's swap leaves it; the other model comes first to its function.
    second._parameters.update({name: nn.Parameter(torch.zeros(1)) for name in raw})
    undo = [detach(second, theirs), detach(first, ours)]
    try:
        first(given()).sum().backward()
        second._parameters.update(raw)
        second(given()).sum().backward()
    finally:
        for one in undo:
            one()
    assert len(ours.taken) == 1 and len(theirs.taken) == 1


def test_a_second_pass_over_a_kept_graph_is_handed_over_once_too() -> None:
    module = grouped()
    bucketing = Owner(module)
    undo = detach(module, bucketing)
    try:
        loss = module(given()).sum() + module(given() * 2).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    finally:
        undo()
    assert len(bucketing.taken) == 2
