"""The dispatcher against Megatron's, with routings that a router seldom makes."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cg.experts import install as dispatcher
from megatron_cg.experts import row_bound
from megatron_cg.experts.grouped_gemm import GroupedGemm
from megatron_cg.experts.install import DeviceCounts, DeviceDispatcher
from tests.unit.grouped_linear import SETTINGS, _GroupedLinear
from tests.unit.ranks import on_ranks

TOKENS, HIDDEN, TOPK = 6, 8, 2


def spread(token: int, experts: int, rank: int) -> list[int]:
    return [(token + rank) % experts, (3 * token + 1 + rank) % experts]


def to_first(_token: int, _experts: int, _rank: int) -> list[int]:
    return [0, 1]


def to_last_rank(token: int, experts: int, _rank: int) -> list[int]:
    return [experts - 1, experts - 2]


def crosswise(token: int, experts: int, rank: int) -> list[int]:
    """Rank 0 sends nothing to itself; the others send to rank 0 alone."""
    return [experts - 1 - token % 2, experts // 2] if rank == 0 else [0, 1]


ROUTINGS = (spread, to_first, to_last_rank, crosswise)


def routing_map(routing: Any, experts: int, rank: int) -> torch.Tensor:
    chosen = torch.zeros(TOKENS, experts, dtype=torch.bool)
    for token in range(TOKENS):
        first, second = routing(token, experts, rank)
        chosen[token, first] = True
        chosen[token, second if second != first else (first + 1) % experts] = True
    return chosen


def make_config(ranks: int, experts: int) -> Any:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ranks,
        add_bias_linear=False,
    )


def eighths(*shape: int) -> torch.Tensor:
    """Numbers whose sums of products are exact: a GEMM of more rows may add in another order."""
    return torch.randint(-8, 9, shape) / 8


def passed(
    kind: Any, gemm: Any, chosen: torch.Tensor, config: Any, drawn: Any = torch.randn
) -> list[torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    experts, groups = chosen.shape[1], get_default_pg_collection()
    local = experts // ranks
    dispatcher = kind(local, [rank * local + i for i in range(local)], config, groups)
    torch.manual_seed(rank)
    hidden = drawn(TOKENS, 1, HIDDEN).requires_grad_()
    probs = (drawn(TOKENS, experts).abs() * chosen).requires_grad_()
    weights = [drawn(HIDDEN, HIDDEN).requires_grad_() for _ in range(local)]
    if kind is not MoEAlltoAllTokenDispatcher:
        cuda_graphs._set_capture_start()
    rows, spread_probs = dispatcher.dispatch_preprocess(hidden, chosen, probs)
    rows, spread_probs = dispatcher.token_dispatch(rows, spread_probs)
    rows, counts, spread_probs = dispatcher.dispatch_postprocess(rows, spread_probs)
    # Quantized rows are a multiple of 128 in all.
    assert getattr(kind, "multiple", 1) == 1 or len(rows) % 128 == 0
    counts = torch.as_tensor(counts.tolist())
    rows, _ = gemm.apply(rows, counts, SETTINGS, None, None, *weights)
    rows = rows * spread_probs.unsqueeze(-1)
    rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    output = dispatcher.combine_postprocess(rows)
    cuda_graphs._set_capture_end()
    (output * drawn(HIDDEN)).sum().backward()
    grads = [tensor.grad for tensor in (hidden, probs, *weights)]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def compare() -> Any:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    equal: dict[str, list[bool]] = {}
    for experts in {max(ranks, 2), 2 * ranks}:
        config = make_config(ranks, experts)
        for routing in ROUTINGS:
            run = partial(passed, chosen=routing_map(routing, experts, rank), config=config)
            # Rows of zeros fill what an expert's rows lack to a multiple.
            aligned = type("Aligned", (DeviceDispatcher,), {"multiple": 4})
            for kind, drawn in ((DeviceDispatcher, torch.randn), (aligned, eighths)):
                theirs = run(MoEAlltoAllTokenDispatcher, _GroupedLinear, drawn=drawn)
                pairs = zip(run(kind, GroupedGemm, drawn=drawn), theirs, strict=True)
                name = f"{kind.__name__}, {experts} {routing.__name__}"
                equal[name] = [torch.equal(*pair) for pair in pairs]
    return equal


def overflow() -> Any:
    """Exchange more rows than fit; write what is wrong with outputs and gradients."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    row_bound.MULTIPLE, most = 1, TOKENS * TOPK
    wrong: list[str] = []
    # Memory that is not initialized holds NaN.
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    for experts in (ranks, 2 * ranks):
        config = make_config(ranks, experts)
        for routing in ROUTINGS:
            chosen = routing_map(routing, experts, rank)
            unbounded = passed(DeviceDispatcher, GroupedGemm, chosen, config)
            for factor in (1.0, 1.5, 100.0):
                bound = row_bound.RowBound(factor)
                bound.place()
                bounded = type("Bounded", (DeviceDispatcher,), {"bound": bound})
                found = passed(bounded, GroupedGemm, chosen, config)
                name = f"{routing.__name__} of {experts}, {factor}"
                if not all(tensor.isfinite().all() for tensor in found):
                    wrong.append(f"{name}: not finite")
                excess = bound.exceeded()
                over = 0 if excess is None else excess.rows
                if not over and not all(map(torch.equal, found, unbounded)):
                    wrong.append(f"{name}: other numbers than without a bound")
                if factor == 100.0 and over:
                    wrong.append(f"{name}: {over} rows are too many")
                # With two local experts, all tokens choose both of rank 0.
                if (routing, factor, experts) == (to_first, 1.0, 2 * ranks) and over != most:
                    wrong.append(f"{name}: {over} rows are found")
    return wrong


def compare_and_overflow() -> Any:
    return [compare(), overflow()]


def test_one_rank_moves_rows_to_multiples() -> None:
    (equal,) = on_ranks(compare, 1)
    assert all(len(found) >= 4 and all(found) for found in equal.values()), equal


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_routing_gives_megatrons_bits_and_beyond_a_bound_all_are_finite(ranks: int) -> None:
    for equal, wrong in on_ranks(compare_and_overflow, ranks):
        assert len(equal) == 4 * len(ROUTINGS)
        # Output, hidden states, probabilities and at least one weight.
        assert all(len(found) >= 4 and all(found) for found in equal.values()), equal
        assert wrong == []


def test_a_shared_expert_waits_before_each_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream reads what this stream computes: the tokens, and all ranks' results."""
    monkeypatch.setattr(dispatcher, "is_capturing", lambda: True)
    made: Any = DeviceDispatcher.__new__(DeviceDispatcher)
    shared = MagicMock()
    vars(made).update(ep_size=1, shared_experts=shared, config=SimpleNamespace())
    rows = torch.ones(2, 3)

    def stages() -> list[str]:
        names = [name for name, *_ in shared.method_calls]
        shared.reset_mock()
        return names

    made.token_dispatch(rows, rows[:, 0])
    assert stages() == ["wait_current_stream", "linear_fc1_forward_and_act"]
    made.token_combine(rows)
    assert stages() == ["wait_current_stream", "linear_fc2_forward", "post_forward_comm"]


def test_counts_are_a_tensor_whose_list_is_it() -> None:
    """megatron-core 0.20 asks tensors alone for a list, and earlier releases ask whatever it is."""
    counts = torch.arange(3).as_subclass(DeviceCounts)
    listed = counts.tolist()
    assert type(listed) is torch.Tensor and listed.data_ptr() == counts.data_ptr()
