"""Layers of Megatron that cannot be compiled for all ranks, and what is said then."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.compiled.region import Region
from megatron_cg.compiled.save import save
from megatron_cg.errors import PrecompileError
from tests.unit.compiled.regions import causal_mask, config, hidden_states, local_layer

ROWS = 8
MOE: dict[str, Any] = {
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def layer(options: dict[str, Any]) -> Region:
    """A layer of Megatron's local implementation."""
    from megatron_cg.compiled.region import megatron_groups

    settings = config(**options)
    made = local_layer(settings)
    mask = {"attention_mask": causal_mask(ROWS, "meta")}
    return Region(made, (hidden_states(settings, "meta"),), mask, megatron_groups(), settings)


def saved(options: dict[str, Any], folder: Path) -> Any:
    return save(lambda: layer(options), folder, name="it", world_size=2, capability=None)


def test_a_layer_without_any_of_it_is_compiled(tmp_path: Path) -> None:
    """With experts that drop and pad; ``test_loaded.py`` compiles a dense one."""
    assert saved(MOE | STATIC, tmp_path).traced_ranks == [0, 1]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"hidden_dropout": 0.1}, ("draws random numbers", "fused_bias_dropout.py")),
        (MOE, ("cannot be traced", "in _maybe_dtoh_and_synchronize")),
        (MOE | STATIC | AUX_LOSS, ("cannot be traced", "moe_utils.py")),
        (SELECTIVE, ("cannot be traced", "rng_states")),
    ],
    ids=["dropout", "dropless", "aux loss", "core_attn"],
)
def test_other_layers_cannot_be_compiled(
    options: dict[str, Any], texts: tuple[str, ...], tmp_path: Path
) -> None:
    """In a new process, as the command runs: where Dynamo stops depends on what was traced."""
    with (
        ProcessPoolExecutor(1, get_context("forkserver")) as pool,
        pytest.raises(PrecompileError) as error,
    ):
        pool.submit(saved, options, tmp_path).result()
    assert all(text in str(error.value) for text in texts), error.value
