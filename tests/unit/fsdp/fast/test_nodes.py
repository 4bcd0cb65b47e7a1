"""Gradients that are taken from the node that computes them, and those that must not be."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_cg.cpu.launch import run_processes
from megatron_cg.fsdp.fast.nodes import install_nodes

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
        if self.way == "twice":
            rows = self.grouped(rows)[0].tanh()
        output = self.grouped(rows)[0]
        if self.way == "used beside":
            # As a penalty on weights is: a second use, and other gradients, of some of them.
            for weight in list(self.grouped.parameters())[1::2]:
                output = output + (weight.square().sum() * 1e-2)
        if self.way == "asked for":
            # What autograd.grad is asked for must come back, and nothing be handed over.
            first = next(self.grouped.parameters())
            (asked,) = torch.autograd.grad(output.sum(), first, retain_graph=True)
            output = output + asked.detach().sum() * 1e-3
        return output


WAYS = {
    "once": 2 * STEPS * 2,
    "recompute": 2 * STEPS * 2,
    # Autograd has the sum of both then, of which one part is kept.
    "twice": 2 * STEPS * 2,
    "used beside": 2 * STEPS * 2,
    "asked for": 2 * STEPS * 2,
    "hooked": 0,
}
"""Passes of the experts whose gradients are kept."""


def fit(way: str, fast: bool) -> dict[str, Any]:
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_cg.fsdp import fast as fast_path
    from megatron_cg.fsdp.fast import nodes

    torch.manual_seed(0)
    taken: list[bool] = []
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes._Taking, "_take", counted(nodes._Taking._take, taken))
        losses = []
        for step in range(STEPS + 1):
            if fast and step == 1:
                path = fast_path.install(model)
                assert "gradients" in path.parts
            optimizer.zero_grad()
            losses += one_step(model, step)
            optimizer.step()
        if fast:
            path.close()
    assert "forward" not in vars(model.module[0].grouped)
    return {"losses": losses, "taken": sum(taken), "seen": len(taken)}


def counted(take: Callable[..., Any], taken: list[bool]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        result = take(*args)
        taken.append(result is not None)
        return result

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


def fit_all(folder: Path) -> None:
    for way in WAYS:
        runs = {name: fit(way, name == "fast") for name in ("eager", "fast")}
        (folder / f"{way}-{dist.get_rank()}.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("nodes")
    run_processes(partial(fit_all, found))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_megatron_fsdp_alone(folder: Path, way: str) -> None:
    for rank in range(2):
        runs = json.loads((folder / f"{way}-{rank}.json").read_text())
        assert runs["fast"]["losses"] == runs["eager"]["losses"]
        assert runs["fast"]["losses"][-1] < runs["fast"]["losses"][0]
        assert runs["fast"]["seen"] > 0 and runs["eager"]["seen"] == 0
        assert runs["fast"]["taken"] == WAYS[way]


class HandOff:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []

    def knows(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter)

    def keep(self, _parameters: Any, gradients: list[torch.Tensor]) -> bool:
        self.gradients.append(gradients)
        return True


def rows() -> torch.Tensor:
    return torch.arange(float(PARTS * WIDTH)).reshape(PARTS, WIDTH).sin().requires_grad_()


@pytest.fixture
def module() -> Grouped:
    torch.manual_seed(0)
    return Grouped()


@pytest.fixture
def hand_off() -> HandOff:
    return HandOff()


def install(module: nn.Module, hand_off: HandOff, graphed: Any = ()) -> Callable[[], None]:
    return install_nodes(nn.Sequential(module), hand_off, graphed)  # type: ignore[arg-type]


def test_each_backward_pass_is_kept_and_none_after_the_undo(
    module: Grouped, hand_off: HandOff
) -> None:
    undo = install(module, hand_off)
    weights = list(module.parameters())
    # Two microbatches on their way at once, as in a pipeline.
    first, second = module(rows())[0].sum(), module(rows())[0].sum()
    first.backward()
    second.backward()
    assert len(hand_off.gradients) == 2 and all(weight.grad is None for weight in weights)
    with torch.no_grad():
        module(rows())
    undo()
    module(rows())[0].sum().backward()
    assert len(hand_off.gradients) == 2 and weights[0].grad is not None


def test_gradients_that_are_asked_for_or_left_out_are_not_kept(
    module: Grouped, hand_off: HandOff
) -> None:
    install(module, hand_off)
    weights, given = list(module.parameters()), rows()
    (asked,) = torch.autograd.grad(module(given)[0].sum(), weights[:1])
    (of_rows,) = torch.autograd.grad(module(given)[0].sum(), given)
    module(given)[0].sum().backward(inputs=[given, weights[1]])
    assert hand_off.gradients == []
    assert asked.abs().sum() > 0 and torch.equal(of_rows, given.grad)  # type: ignore[arg-type]
    assert [weight.grad is not None for weight in weights[:3]] == [False, True, False]


def test_a_parameter_that_an_operation_has_twice_is_left_to_autograd(hand_off: HandOff) -> None:
    module = Grouped()
    module._parameters["weight5"] = module._parameters["weight0"]
    install(module, hand_off)
    module(rows())[0].sum().backward()
    assert hand_off.gradients == [] and all(w.grad is not None for w in module.parameters())


def test_modules_inside_of_graphs_are_left_as_they_are(hand_off: HandOff) -> None:
    graphed, eager = Grouped(), Grouped()
    install_nodes(nn.Sequential(graphed, eager), hand_off, {graphed})  # type: ignore[arg-type]
    assert "forward" not in vars(graphed) and "forward" in vars(eager)


def test_what_is_kept_are_the_gradients_in_the_parameters_order(
    module: Grouped, hand_off: HandOff
) -> None:
    module(rows())[0].square().sum().backward()
    expected = [weight.grad for weight in module.parameters()]
    for weight in module.parameters():
        weight.grad = None
    install(module, hand_off)
    given = rows()
    module(given)[0].square().sum().backward()
    assert given.grad is not None
    (found,) = hand_off.gradients
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None and torch.equal(ours, theirs)
