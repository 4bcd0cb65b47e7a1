"""A rank digests the weights that it owns, and no copies of what other ranks own."""

from typing import Any

import torch

from megatron_cg.tools.record.record import digest, parameter_digests
from tests.unit.ranks import on_ranks

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


def digests_change(strategy: str, *, own: bool) -> bool:
    """Whether digests are others after this rank's own or all other weights have changed."""
    from megatron.core import parallel_state

    from megatron_cg.tape.cpu_model import build
    from megatron_cg.tape.training_plan import CpuModelConfig

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


def test_copies_of_other_ranks_weights_are_left_out() -> None:
    """Their state at the end of a run is random where only the optimizer's are sharded."""
    for rank in on_ranks(changes):
        assert rank == {strategy: [True, False] for strategy in STRATEGIES}


def test_a_digest_sees_one_bit_the_dtype_and_the_shape() -> None:
    tensor = torch.linspace(0, 1, 8).to(torch.float8_e4m3fn)
    assert digest(tensor) == digest(tensor.clone())
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    others = (changed, tensor.reshape(2, 4), tensor.view(torch.uint8))
    assert len({digest(tensor), *map(digest, others)}) == 4
    assert digest(tensor[:0]) != digest(tensor)


def test_under_fsdp_main_and_model_weights_are_told_apart(dense_model: Any) -> None:
    buffer = dense_model.module.param_and_grad_buffer
    before = parameter_digests(dense_model)
    names = {buffer.param_to_name[parameter] for parameter in buffer.params}
    assert {name.partition(":")[2] for name in before} == names
    for group in buffer.parameter_groups:
        if group.main_weight_buffer is not None:
            group.main_weight_buffer.data.add_(1)
    after = parameter_digests(dense_model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.startswith("main:")} != set()
