"""Replays beside eager passes: equal bits pass, one changed bit does not, and training stays."""

from collections.abc import Callable
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.capture.guarded_capture import without_gradients
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.replay.unit import Unit
from megatron_cg.replay.verify import ROUNDS, _differences, verify
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import undone_after
from tests.unit.backends.blocks import in_backward
from tests.unit.counted import expect
from tests.unit.fastpath.test_order import noted
from tests.unit.trainers import layers_of, trainer_of

pytestmark = pytest.mark.fault
STEPS, LAYERS = 4, 2
BALANCED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def run(
    policy: ReplayPolicy | None,
    *,
    experts: int = 0,
    wrong: str = "",
    fast_path: bool = True,
    microbatches: int = 1,
    **fsdp_options: Any,
) -> tuple[list[Any], Any, Any]:
    from megatron.core.transformer.moe import moe_logging

    scopes = ("attn", "moe_router") if experts else ("attn", "mlp")
    model = CpuModelConfig(
        layers=LAYERS,
        graph_modules=scopes,
        experts=experts,
        dropout=0.2,
        options=BALANCED if experts else {},
        fsdp_options=fsdp_options,
    )
    moe_logging.destroy_moe_metrics_tracker()
    graphs = policy is not None
    with (
        undone_after(moe_logging.destroy_moe_metrics_tracker),
        trainer_of(model, graphs=graphs, microbatches=microbatches) as trainer,
    ):
        numbers = [trainer.step() for _ in range(2)]
        if graphs:
            trainer.capture(TapeBackend(), policy=policy, fast_path=fast_path)
        tracker = moe_logging.get_moe_metrics_tracker()
        tracker.clear()
        if wrong:
            recorded = layers_of(trainer)[1].cuda_graphs[0].graph._recorded
            direction, tensor, _ = WRONG[wrong]
            getattr(recorded, direction).entries.append(partial(flip, tensor(recorded)))
        numbers += [trainer.step() for _ in range(STEPS)]
        routers = [m for m in trainer.model.modules() if type(m).__name__ == "TopKRouter"]
        assert len(routers) == (LAYERS if experts else 0)
        numbers += [router.local_tokens_per_expert.tolist() for router in routers]
        metrics = {k: v.values.tolist() for k, v in tracker.metrics.items()}
        return numbers, trainer.session and trainer.session.counters, metrics


@cache
def eagerly() -> list[Any]:
    return run(None)[0]


WRONG: dict[str, tuple[str, Callable[[Any], torch.Tensor], str]] = {
    "output": ("forward", lambda recorded: recorded.outputs[0], "output 0"),
    "hidden": (
        "backward",
        lambda recorded: recorded.grad_inputs[0],
        "the gradient of hidden_states",
    ),
    "weight": ("backward", lambda recorded: recorded.grad_inputs[-1], r"gradient of \S+weight, "),
}
"""After which replay one bit is wrong, of what, and how that is named."""


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.int16)[7] ^= 1


@pytest.mark.parametrize(
    ("strategy", "fast_path", "experts"),
    [
        *(("optim_grads_params", True, 4), ("optim_grads_params", False, 0)),
        *(("optim_grads", True, 4), ("optim", True, 0), ("no_shard", True, 4)),
    ],
)
def test_verification_finds_nothing_and_changes_nothing(
    strategy: str, fast_path: bool, experts: int, one_rank: None
) -> None:
    options: dict[str, Any] = {"microbatches": 2, "data_parallel_sharding_strategy": strategy}
    eager, _, expected = run(None, experts=experts, **options)
    policy = ReplayPolicy("error", 2)
    numbers, counters, metrics = run(policy, experts=experts, fast_path=fast_path, **options)
    assert (numbers, metrics) == (eager, expected) and bool(metrics) == bool(experts)
    passes = 2 * LAYERS * STEPS
    expect(counters, replayed=passes, backwards=passes, mismatched=0)
    expect(counters, verified=passes // 2, outputs_only=0, gradients_unstable=0)


@pytest.mark.parametrize(
    ("wrong", "fast_path"), [("output", True), ("hidden", False), ("weight", True)]
)
def test_one_wrong_bit_is_found_and_the_part_run_eagerly_or_the_run_ends(
    wrong: str, fast_path: bool, one_rank: None
) -> None:
    numbers, counters, _ = run(ReplayPolicy("eager", 1), wrong=wrong, fast_path=fast_path)
    assert numbers == eagerly()
    expect(counters, mismatched=STEPS, replayed=(LAYERS - 1) * STEPS, eager=STEPS)
    with pytest.raises(ReplayMismatchError, match=f"layer 1.*{WRONG[wrong][2]}.*different in 1 of"):
        run(ReplayPolicy("error", 3), wrong=wrong, fast_path=fast_path)


class Scaled(nn.Module):
    """A gradient in it has different bits in each pass, as with atomics on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.passes = count(2)

    def forward(self, x: torch.Tensor, wrong: float = 0.0) -> torch.Tensor:
        self.kept = x
        after = self.after + wrong * (self.after - self.after.detach())
        unsteady = in_backward(x * self.before, lambda gradient: gradient * next(self.passes))
        return unsteady * after


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_differ_by_themselves_are_no_mismatch(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    module = Scaled()
    unit = Unit("layer 0", module, ())
    counted: list[int] = []

    def checked(**wrong: float) -> str:
        x, kept = torch.ones(2, 4, requires_grad=True), partial(without_gradients, weights)
        graph = partial(module, **wrong)
        found, unstable = verify(unit, graph, [x], {}, kept)
        counted.append(unstable)
        return "" if found is None else found.text("layer 0")

    weights = list(module.parameters())
    if deterministic:
        assert "the gradient of hidden_states" in checked() and counted == [0]
    else:
        assert checked() == "" and counted == [2]  # of the input, and of the weight before
        assert "the gradient of after" in checked(wrong=1.0)
    assert all(tensor.grad is None for tensor in (*weights, module.kept))


@pytest.mark.parametrize("wrong_replays", [{0}, {0, 1, 2}, set(range(99))])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_difference_counts_if_each_replay_has_it(
    wrong_replays: set[int], elsewhere: bool
) -> None:
    module, replays = nn.Linear(4, 4), count()
    unit = Unit("layer 0", module, ())
    asked: list[bool] = []

    def graph(x: torch.Tensor) -> torch.Tensor:
        # As after a sum in another order, rounded to bfloat16: rarely another byte.
        out: torch.Tensor = module(x) + float(next(replays) in wrong_replays)
        return out

    def on_any_rank(here: bool) -> bool:
        asked.append(here)
        return here or elsewhere

    x, kept = torch.ones(2, 4), partial(without_gradients, list(module.parameters()))
    found, _ = verify(unit, graph, [x], {}, kept, on_any_rank=on_any_rank)
    is_wrong = len(wrong_replays) == 99
    assert asked.count(True) == 2 * min(len(wrong_replays), ROUNDS)
    assert len(asked) == 2 * (ROUNDS if elsewhere or is_wrong else len(wrong_replays) + 0.5)
    assert (found is not None) == (elsewhere or is_wrong)
    assert found is None or ("output 0" if is_wrong else "on another rank") in found.text("layer 0")


def test_a_verification_runs_once_the_next_unit_is_gathered(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ([torch.tensor(torch.nan), None], [torch.tensor(torch.nan), None], None),
        (*[[torch.ones(2, dtype=torch.cfloat).conj()]] * 2, None),
        (*[[torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8)]] * 2, None),
    ],
)
def test_outputs_are_compared_by_their_bits(one: Any, two: Any, words: str | None) -> None:
    eager, replayed = ([("an output", tensor) for tensor in tensors] for tensors in (one, two))
    found = [mismatch.text("layer 0") for mismatch in _differences(eager, replayed).values()]
    assert not found if words is None else words in found[0]
