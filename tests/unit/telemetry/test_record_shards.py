"""A rank digests the weights that it owns, and no copies of what other ranks own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ranks import on_ranks

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


def digests_change(strategy: str, *, own: bool) -> bool:
    """Whether digests are others after this rank's own or all other weights have changed."""
    from megatron.core import parallel_state

    from megatron_cg.telemetry.record_shards import parameter_digests
    from megatron_cg.tools.cpu.cpu_model import build
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig

    options = {"data_parallel_sharding_strategy": strategy}
    model: Any = build(CpuModelConfig(layers=1, hidden_size=16, fsdp_options=options))
    try:
        before = parameter_digests(model)
        for group in model.module.param_and_grad_buffer.parameter_groups:
            weights = group.model_weight_buffer
            if weights is None:
                continue
            index = weights.shard_bucket_index
            mine = weights.data[index.local_data_index :][: index.size]
            kept = mine.clone()
            (mine if own else weights.data).add_(1)
            if not own:
                mine.copy_(kept)
        return parameter_digests(model) != before
    finally:
        parallel_state.destroy_model_parallel()


def changes() -> dict[str, list[bool]]:
    return {
        strategy: [digests_change(strategy, own=own) for own in (True, False)]
        for strategy in STRATEGIES
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[bool]]]:
    return on_ranks(changes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_of_other_ranks_weights_are_left_out(
    found: list[dict[str, list[bool]]], strategy: str
) -> None:
    """Their state at the end of a run is random where only the optimizer's are sharded."""
    for rank in found:
        assert rank[strategy] == [True, False]
