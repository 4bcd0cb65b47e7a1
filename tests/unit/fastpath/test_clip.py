"""Gradients clipped by the fast path, and their norm: bit for bit those of Megatron's own way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as made_by_megatron
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, clip_grads
from megatron.core.optimizer import optimizer as megatrons
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from megatron_cg.fastpath.optimizer_step import install_clip
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.tape.cpu_model import build
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks

Change = Callable[[Any, Any], Any]
STEPS = range(1, 8)


class Applier:
    """As Transformer Engine's, where that is not installed."""

    def __init__(self, chunk_size: int = 2048) -> None:
        self.chunk_size = chunk_size

    def __call__(self, kernel: Any, flag: Any, lists: Any, *numbers: Any) -> Any:
        sizes = [tensor.numel() for tensor in lists[0]]
        left = [[t for t, size in zip(row, sizes, strict=True) if size] for row in lists]
        return kernel(self.chunk_size, flag, left, *numbers) if left[0] else None


def norm_kernel(chunk: int, flag: Any, lists: Any, each: bool) -> tuple[torch.Tensor, None]:
    assert flag.tolist() == [0] and not each
    total = torch.zeros(1)
    for tensor in lists[0]:
        total = total * (1 - chunk / 100_000) + tensor.double().square().sum().float()
    return total.sqrt(), None


def scale_kernel(chunk: int, flag: Any, lists: Any, factor: torch.Tensor) -> None:
    assert flag.tolist() == [0]
    flag.fill_(1)  # as where a number is not finite
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor - chunk / 100_000)


@contextmanager
def kernels() -> Iterator[pytest.MonkeyPatch]:
    """On the CPU, with tensors that say they are on the GPU."""
    kind: Any = torch.Tensor.type
    with pytest.MonkeyPatch.context() as patch:
        if clip_grads.multi_tensor_scale_tensor_impl is None:
            patch.setattr(clip_grads, "multi_tensor_applier", Applier())
        patch.setattr(clip_grads, "l2_norm_impl", norm_kernel)
        patch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", scale_kernel)
        patch.setattr(
            torch.Tensor, "type", lambda t, *a: kind(t, *a) if a else f"torch.cuda.{kind(t)[6:]}"
        )
        yield patch


@pytest.fixture(autouse=True)
def patch(one_rank: None) -> Iterator[pytest.MonkeyPatch]:
    with kernels() as patch:
        yield patch


def a_group(rank: int) -> Any:
    return SimpleNamespace(rank=lambda: rank)


def distributed(tensor: torch.Tensor) -> Any:
    return distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


def parameters() -> list[Any]:
    torch.manual_seed(1)
    made: list[Any] = [nn.Parameter(distributed(torch.randn(3, n))) for n in (2, 1, 4, 0, 5, 3)]
    for parameter in made:
        parameter.__fsdp_param__ = True
    return made


def optimizer_of(some: list[Any], cls: Any = megatrons.FP32Optimizer) -> Any:
    sgd = torch.optim.SGD([{"params": some[:3]}, {"params": some[3:]}], lr=0.1)
    optimizer = cls(sgd, OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=1.0), None)
    optimizer.grad_stats_parallel_group = dist.group.WORLD
    optimizer.tp_group = optimizer.expert_tp_group = a_group(0)
    return optimizer


def give_gradients(optimizer: Any, number: int) -> None:
    """Large ones and small ones by turns, for some parameters none, at last an infinite one."""
    for place, parameter in enumerate(optimizer.get_parameters()):
        local = (parameter.detach()._local_tensor * number + place).sin() * 10.0 ** (number % 2 - 1)
        if (place, number) == (4, STEPS[-1]):
            local[0, 0] = float("inf")
        without = (place, number) in ((1, 1), (1, 4), (2, 3))
        parameter.grad = None if without else distributed(local)


def bits(tensor: Any) -> Any:
    local = getattr(tensor, "_local_tensor", tensor)
    return None if local is None else local.detach().float().view(torch.int32).tolist()


def left_by_a_step(optimizer: Any) -> list[Any]:
    _, norm, _ = optimizer.step()
    tensors = [bits(tensor) for p in optimizer.get_parameters() for tensor in (p.grad, p)]
    return [bits(norm), list(norm.shape), optimizer.grad_norms_by_group, tensors]


def step(optimizer: Any, number: int) -> list[Any]:
    give_gradients(optimizer, number)
    return left_by_a_step(optimizer)


def steps(optimizer: Any) -> list[Any]:
    return [step(optimizer, number) for number in STEPS]


def of_both(run: Callable[[Any], list[Any]], calls: int, mark: Any = None) -> list[Any]:
    """What ``run`` finds, the same in both ways; so many calls are not Megatron's own."""
    runs = []
    for ours in (False, True):
        optimizer = optimizer_of(some := parameters())
        if mark is not None:
            mark(optimizer, some)
        undo = install_clip([optimizer]) if ours else None
        runs.append(run(optimizer))
        if undo is not None:
            assert optimizer.clip_grad_norm.__wrapped__.calls == calls
            undo()
        assert "clip_grad_norm" not in vars(optimizer)
        runs[-1].append(step(optimizer, STEPS[-1] + 1))
    assert runs[0] == runs[1]
    return runs[0]


def shared(_: Any, some: list[Any]) -> None:
    some[0].shared, some[1].shared, some[2].shared = False, True, True


def of_tensor_parallel(optimizer: Any, some: list[Any]) -> None:
    optimizer.tp_group = optimizer.expert_tp_group = a_group(1)
    some[0].tensor_model_parallel, some[1].tensor_model_parallel = True, False
    some[5].tensor_model_parallel = True


def of_experts(optimizer: Any, some: list[Any]) -> None:
    optimizer.expert_tp_group = a_group(1)
    some[1].allreduce = some[4].allreduce = False


def of_gtp(_: Any, some: list[Any]) -> None:
    some[5].is_gtp_weight_remat = True


def of_no_number(_: Any, some: list[Any]) -> None:
    some[4].detach()._local_tensor.fill_(float("nan"))


def test_norm_gradients_and_weights_are_megatron_s(patch: pytest.MonkeyPatch) -> None:
    firsts = set()
    for mark in (None, shared, of_tensor_parallel, of_experts, of_gtp, of_no_number):
        gtp_rank = partial(int, mark is of_gtp)
        patch.setattr("megatron.core.tensor_parallel.layers.get_gtp_weight_remat_rank", gtp_rank)
        found = of_both(steps, 7, mark)
        firsts.add(str(found[1][0]))
        norms = torch.tensor([left[0] for left in found[:6]], dtype=torch.int32).view(torch.float)
        assert mark is of_no_number or norms.min() < 1 < norms.max()
    assert len(firsts) == 6, "a parameter left out of the norm made no difference"


def test_without_a_gradient_that_counts_it_is_megatron_s() -> None:
    second = a_group(1)
    of_both(steps, 0, lambda o, _: o.__dict__.update(tp_group=second, expert_tp_group=second))
    of_both(lambda optimizer: [left_by_a_step(optimizer), step(optimizer, 1)], 1)


def replaced(optimizer: Any, _: Any) -> None:
    old = optimizer.optimizer.param_groups[0]["params"][0]
    new: Any = nn.Parameter(old.detach() * 3)
    new.__fsdp_param__ = new.shared = True
    optimizer.optimizer.param_groups[0]["params"][0] = new


def fewer(optimizer: Any, _: Any) -> None:
    optimizer.optimizer.param_groups[1]["params"].pop()


@pytest.mark.parametrize("change", [replaced, fewer])
def test_what_changes_is_read_anew(change: Change) -> None:
    def run(optimizer: Any) -> list[Any]:
        found = [step(optimizer, number) for number in (1, 2, 3)]
        change(optimizer, None)
        return found + [step(optimizer, number) for number in (4, 5)]

    of_both(run, 5)


class AnotherTensor(torch.Tensor):
    pass


def become(change: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, _: Any) -> None:
    gradient = optimizer.get_parameters()[1].grad
    gradient._local_tensor = change(gradient._local_tensor)


def norm_alone(optimizer: Any, _: Any) -> None:
    optimizer.step = lambda: (True, optimizer.clip_grad_norm(0.0), None)


def without_gradients(optimizer: Any, _: Any) -> None:
    for parameter in optimizer.get_parameters():
        parameter.grad = None


UNUSUAL: dict[str, Change] = {
    "type": partial(become, lambda local: local.as_subclass(AnotherTensor)),
    "dtype": partial(become, torch.Tensor.bfloat16),
    "norm alone": norm_alone,
    "without gradients": without_gradients,
}


@pytest.mark.parametrize("state", UNUSUAL)
def test_an_unusual_state_is_megatron_s(state: str) -> None:
    def run(optimizer: Any) -> list[Any]:
        found = [step(optimizer, number) for number in (1, 2)]
        give_gradients(optimizer, 3)
        UNUSUAL[state](optimizer, None)
        return [*found, left_by_a_step(optimizer)]

    of_both(run, 2)


class Choosing(megatrons.FP32Optimizer):  # type: ignore[misc]
    def get_grads_for_grad_norm(self, *args: Any) -> Any:
        return super().get_grads_for_grad_norm(*args)[1:]


@pytest.mark.parametrize("kind", ["the chain", "no Megatron's", "precise", "own method"])
def test_what_this_cannot_clip_is_left_alone(kind: str) -> None:
    some = parameters()
    makers: dict[str, Callable[[], Any]] = {
        "the chain": lambda: megatrons.ChainedOptimizer([optimizer_of(some)]),
        "no Megatron's": lambda: torch.optim.SGD(some),
        "precise": lambda: optimizer_of(some),
        "own method": lambda: optimizer_of(some, cls=Choosing),
    }
    optimizer = makers[kind]()
    if kind == "precise":
        optimizer.config.use_precision_aware_optimizer = True
    before = dict(vars(optimizer))
    with pytest.raises(NotApplicableError):
        install_clip([optimizer])
    undo = install_clip([optimizer, other := optimizer_of(parameters()), other])
    assert "clip_grad_norm" in vars(other) and vars(optimizer) == before
    undo()
    assert "clip_grad_norm" not in vars(other)


def clipped(ours: bool, apart: bool) -> tuple[list[Any], int]:
    """What calls leave, under Megatron-FSDP; how many of them were not Megatron's own."""
    model: Any = build(CpuModelConfig(layers=1, hidden_size=16))
    options = {"lr": 1e-3, "min_lr": 1e-3, "bf16": True, "use_distributed_optimizer": True}
    optimizer = made_by_megatron.get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", **options), [model], use_gloo_process_groups=False
    )
    some, store = optimizer.get_parameters(), model.module.param_and_grad_buffer
    if apart:
        some[0].grad_norm_group = "mtp"
    undo, found, calls = None, [], 0
    for number in range(1, 6):
        if ours and number in (1, 4):  # on the second rank it is Megatron's own for a while
            undo = undo or install_clip([optimizer])
        for group in store.parameter_groups:
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            group.main_grad_buffer.data.normal_(generator=generator).mul_(10.0 ** (number - 4))
        store.update_main_grads()
        optimizer.grad_norms_by_group = None
        norm = optimizer.clip_grad_norm(1.0)
        groups = {name: bits(value) for name, value in optimizer.grad_norms_by_group.items()}
        found.append([bits(norm), groups, [bits(p.grad) for p in some]])
        if undo is not None and (dist.get_rank(), number) == (1, 2):
            calls, undo = optimizer.clip_grad_norm.__wrapped__.calls, undo()
    parallel_state.destroy_model_parallel()
    own = getattr(optimizer.clip_grad_norm, "__wrapped__", None)
    return found, calls + getattr(own, "calls", 0)


def clip_in_all_ways() -> list[Any]:
    ways = [(ours, apart) for apart in (False, True) for ours in (False, True)]
    with kernels():
        return [clipped(ours, apart and dist.get_rank() == 0) for ours, apart in ways]


def test_ranks_agree_whichever_way_each_of_them_takes() -> None:
    ranks = on_ranks(clip_in_all_ways)
    for (megatron_s, ours, megatron_s_apart, apart), calls in zip(ranks, (5, 4), strict=True):
        assert ours[0] == megatron_s[0] != megatron_s_apart[0] == apart[0]
        # The first rank has a parameter that is clipped apart, and the second takes part in that.
        assert (ours[1], apart[1]) == (calls, 0 if calls == 5 else calls)
    assert len({str([call[0] for call in found[1][0]]) for found in ranks}) == 1
    assert any(None in call[2] for call in ranks[0][0][0] + ranks[1][0][0])
