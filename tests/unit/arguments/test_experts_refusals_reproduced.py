"""What Megatron's dispatchers read on the host, which keeps them out of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_memory import Pool
from megatron_cg.backends.tape.tape_recording import recording
from megatron_cg.errors import HostSyncError
from megatron_cg.upstream.megatron import capturing_flag

TOKENS, HIDDEN, EXPERTS = 6, 4, 4


@contextmanager
def captured() -> Iterator[None]:
    """What the block runs is captured, as far as Megatron, this package and a tape know."""
    with capturing_flag(), recording(Pool(), torch.nn.Identity(), "a MoE layer"):
        yield


@pytest.mark.refuses("experts-uneven")
@pytest.mark.parametrize(
    ("factor", "rows"), [(None, [TOKENS, TOKENS]), (1.0, [TOKENS, TOKENS - 1])]
)
def test_with_a_capacity_the_number_of_rows_depends_on_the_routing(
    factor: float | None, rows: list[int], one_rank: None
) -> None:
    """Router padding takes the same branch of Megatron's ``preprocess``."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_cg.moe.dispatcher import DeviceDispatcher

    parallel_state.initialize_model_parallel()
    reads = pytest.raises(HostSyncError, match=r"aten\._local_scalar_dense")
    found = []
    for kept in (TOKENS, TOKENS - 1):
        chosen = (torch.arange(TOKENS) < kept)[:, None]
        given = torch.ones(TOKENS, 1, HIDDEN), chosen, chosen.float()
        megatrons, ours = (
            dispatcher_of_one_expert(kind, moe_expert_capacity_factor=factor)
            for kind in (MoEAlltoAllTokenDispatcher, DeviceDispatcher)
        )
        found.append(len(megatrons.dispatch_preprocess(*given)[0]))
        with nullcontext() if factor is None else reads, captured():
            ours.dispatch_preprocess(*given)
    assert found == rows


def dispatcher_of_one_expert(kind: Any, **options: Any) -> Any:
    """Whose weights all ranks of the group of expert tensor parallelism share."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=1,
        moe_router_pre_softmax=True,
        moe_router_topk=1,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        **options,
    )
    return kind(1, [0], config, get_default_pg_collection())
