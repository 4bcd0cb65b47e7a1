"""Replays beside eager passes: equal bits pass, one changed bit does not, and training stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.capture.transaction import without_gradients
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay import guarded_graph
from megatron_cg.replay.eager_passes import EagerPasses
from megatron_cg.replay.mismatch_policy import MismatchPolicy, ReplayPolicy
from megatron_cg.replay.unit import Unit
from megatron_cg.replay.verify import _first_difference, verify
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import undone_after
from tests.unit.counted import expect
from tests.unit.fastpath.test_deferred_prefetch import noted
from tests.unit.trainers import trainer_of

STEPS, LAYERS = 4, 2


def run(
    policy: ReplayPolicy | None,
    *,
    experts: int = 0,
    corrupt: Callable[[Any], None] | None = None,
    fast_path: bool = True,
    microbatches: int = 1,
    steps: int = STEPS,
    **fsdp_options: Any,
) -> tuple[list[Any], Any, Any]:
    """Losses and norms, counters, and MoE metrics of a training run."""
    from megatron.core.transformer.moe.moe_logging import (
        destroy_moe_metrics_tracker,
        get_moe_metrics_tracker,
    )

    from megatron_cg.backends.tape.tape_backend import TapeBackend
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    scopes = ("attn", "moe_router") if experts else ("attn", "mlp")
    model = CpuModelConfig(
        layers=LAYERS,
        graph_modules=scopes,
        experts=experts,
        dropout=0.2,
        fsdp_options=fsdp_options,
    )
    destroy_moe_metrics_tracker()
    graphs = policy is not None
    with (
        undone_after(destroy_moe_metrics_tracker),
        trainer_of(model, graphs=graphs, microbatches=microbatches) as trainer,
    ):
        numbers = [trainer.step() for _ in range(2)]
        if graphs:
            trainer.capture(TapeBackend(), policy=policy, fast_path=fast_path)
        get_moe_metrics_tracker().clear()
        if corrupt is not None:
            corrupt(transformer_layers(trainer.model)[1].cuda_graphs[0].graph._recorded)
        numbers += [trainer.step() for _ in range(steps)]
        metrics = {k: v.values.tolist() for k, v in get_moe_metrics_tracker().metrics.items()}
        return numbers, trainer.session and trainer.session.counters, metrics


@cache
def eagerly(experts: int = 0) -> tuple[list[Any], Any]:
    """Losses and norms, and MoE metrics, of the same run without graphs; equal in every test."""
    numbers, _, metrics = run(None, experts=experts)
    return numbers, metrics


def wrong_output(recorded: Any) -> None:
    """One bit of the first output is wrong after each replay of the forward pass."""
    recorded.forward.entries.append(partial(flip, recorded.outputs[0]))


def wrong_input_gradient(recorded: Any) -> None:
    """One bit of the gradient of the hidden states, after each replay of the backward pass."""
    recorded.backward.entries.append(partial(flip, recorded.grad_inputs[0]))


def wrong_weight_gradient(recorded: Any) -> None:
    """One bit of the gradient of the last weight."""
    assert len(recorded.grad_inputs) > recorded.user_args
    recorded.backward.entries.append(partial(flip, recorded.grad_inputs[-1]))


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.int16)[7] ^= 1


def all_of(counters: Any, steps: int) -> None:
    expect(counters, verified=steps, gradients_verified=steps, gradients_unstable=0, mismatched=0)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("fast_path", [True, False])
def test_verification_finds_nothing_and_changes_nothing(
    experts: int, fast_path: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, eager_metrics = eagerly(experts)
    policy = ReplayPolicy("error", 2)
    # Each look at the clock is one ns after the last, so a guard takes 1 ns.
    monkeypatch.setattr(guarded_graph, "time", SimpleNamespace(perf_counter_ns=count().__next__))
    numbers, counters, metrics = run(policy, experts=experts, fast_path=fast_path)
    assert numbers == eager and metrics == eager_metrics
    assert bool(metrics) == bool(experts)
    all_of(counters, LAYERS * STEPS // 2)
    passes = LAYERS * STEPS
    expect(counters, replayed=passes, backwards=passes, guard_ns=2 * passes)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim", "no_shard"])
def test_gradients_are_verified_under_every_strategy(
    strategy: str, experts: int, one_rank: None
) -> None:
    options: dict[str, Any] = {"microbatches": 2, "data_parallel_sharding_strategy": strategy}
    options["steps"] = 2
    eager, _, _ = run(None, experts=experts, **options)
    numbers, counters, _ = run(ReplayPolicy("error", 1), experts=experts, **options)
    assert numbers == eager
    all_of(counters, 2 * LAYERS * options["steps"])


@pytest.mark.parametrize("corrupt", [wrong_output, wrong_input_gradient, wrong_weight_gradient])
@pytest.mark.parametrize("fast_path", [True, False])
def test_one_wrong_bit_is_found_and_the_part_run_eagerly(
    corrupt: Callable[[Any], None], fast_path: bool, one_rank: None
) -> None:
    eager, _ = eagerly()
    policy = ReplayPolicy("eager", 1)
    numbers, counters, _ = run(policy, corrupt=corrupt, fast_path=fast_path)
    assert numbers == eager
    expect(counters, mismatched=STEPS, replayed=(LAYERS - 1) * STEPS, eager=STEPS)


def made_with(patch: pytest.MonkeyPatch, owner: type[Any], **values: Any) -> None:
    """Let objects of a class have these attributes from the start."""
    make = owner.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        vars(self).update(values)

    patch.setattr(owner, "__init__", made)


def test_a_step_that_is_repeated_runs_every_region_eagerly(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_with(monkeypatch, MismatchPolicy, repeats=True)
    numbers, counters, _ = run(ReplayPolicy("eager", 1))
    assert numbers == eagerly()[0]
    expect(counters, eager=LAYERS * STEPS, replayed=0, mismatched=0, verified=0)


@pytest.mark.parametrize(
    ("collectives", "hold"), [(False, False), (True, True), (True, False), (False, True)]
)
def test_a_wrong_bit_counts_unless_the_step_will_be_repeated(
    collectives: bool, hold: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers beyond a bound of rows are no mismatch. Only graphs that exchange rows have one."""
    made_with(monkeypatch, MismatchPolicy, numbers_hold=lambda: hold)
    made_with(monkeypatch, EagerPasses, collectives=collectives)
    numbers, counters, _ = run(ReplayPolicy("eager", 1), corrupt=wrong_output)
    counts = not collectives or hold
    assert (numbers == eagerly()[0]) == counts
    wrong, right = STEPS * counts, STEPS * (not counts)
    expect(counters, mismatched=wrong, replayed=(LAYERS - 1) * STEPS + right, eager=wrong)


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (wrong_input_gradient, r"layer 1.*the gradient of input 0.*different in 1 of"),
        (wrong_weight_gradient, r"layer 1.*the gradient of \S+weight, .*different in 1 of"),
    ],
)
def test_a_wrong_gradient_is_named(
    corrupt: Callable[[Any], None], words: str, one_rank: None
) -> None:
    with pytest.raises(ReplayMismatchError, match=words):
        run(ReplayPolicy("error", 3), corrupt=corrupt)


class Unsteady(torch.autograd.Function):
    """Returns its input; its gradient has different bits in each pass, as with atomics on a GPU."""

    passes = 0

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Unsteady.passes += 1
        return gradients[0] * (1 + Unsteady.passes)


unsteady: Callable[..., Any] = Unsteady.apply


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = unsteady(x * self.before) * self.after
        return out


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_differ_by_themselves_are_no_mismatch(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    module = Scaled()
    unit = Unit("layer 0", module, (), run=lambda m, a, k: m(*a, **k), in_backward=nullcontext)
    counted: list[int] = []

    def kept() -> Any:
        return without_gradients(list(module.parameters()))

    def checked(graph: Callable[..., Any]) -> Any:
        x = torch.ones(2, 4, requires_grad=True)
        return verify(unit, graph, [x], {}, kept, left_out=counted.append)

    found = checked(module)
    if deterministic:
        assert found is not None and "the gradient of input 0" in found.text("layer 0")
        assert counted == []
        return
    assert found is None and counted == [2]  # of the input, and of the weight before
    after = checked(lambda x: unsteady(x * module.before) * twice(module.after))
    assert after is not None and "the gradient of after" in after.text("layer 0")
    assert all(parameter.grad is None for parameter in module.parameters())


def twice(weight: torch.Tensor) -> torch.Tensor:
    """The weight, and twice its gradient."""
    return weight + weight - weight.detach()


def test_one_wrong_bit_ends_the_run_where_that_was_asked_for(one_rank: None) -> None:
    with pytest.raises(ReplayMismatchError, match=r"layer 1.*output 0.*different in 1 of"):
        run(ReplayPolicy("error", 3), corrupt=wrong_output)


def test_a_verification_runs_once_the_next_unit_is_gathered(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.backends.tape.tape_backend import TapeBackend

    model = CpuModelConfig(layers=3, graph_modules=("attn", "mlp"))
    with trainer_of(model, graphs=True) as trainer:
        trainer.step()
        trainer.capture(TapeBackend(), policy=ReplayPolicy("error", verify_interval=2))
        trainer.step()
        events = noted(trainer.model.module, monkeypatch)

        def noting(*args: Any, **options: Any) -> Any:
            events.append("verify")
            return verify(*args, **options)

        monkeypatch.setattr("megatron_cg.replay.guarded_graph.verify", noting)
        trainer.step()
    assert [event for event in events if "None" not in event] == [
        *("forward: gather 0", "forward: gather 1", "verify", "launch"),
        *("forward: gather 2", "verify", "launch", "verify", "launch"),
        *("backward: gather 1", "backward: gather 2", "backward: gather 0"),
    ]


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        ([torch.tensor([0.0])], [torch.tensor([-0.0])], "different in 1 of 4 bytes"),
        ([torch.ones(2)], [torch.ones(3)], "shape (3,)"),
        ([torch.ones(2)], [None], "None"),
        ([torch.ones(2)], [], "the number of outputs"),
    ],
)
def test_outputs_are_compared_by_their_bits(one: Any, two: Any, words: str) -> None:
    found = _first_difference(named(one), named(two))
    assert found is not None and words in found.text("layer 0")


def test_nan_is_nan() -> None:
    nan = torch.full((3,), float("nan"), dtype=torch.bfloat16)
    assert _first_difference(named([nan, None]), named([nan.clone(), None])) is None


def named(tensors: list[Any]) -> list[Any]:
    return [("an output", tensor) for tensor in tensors]
