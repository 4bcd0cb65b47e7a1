"""What a run trains, on which data and in which layout. Compared runs must agree on it.

An attribute of Megatron's namespace that a release lacks is recorded as None.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cg.upstream.symbols import Symbol

_ARGS = Symbol("megatron.training.global_vars:get_args", "the run's arguments")
RELIES_ON = (_ARGS,)

Setup = dict[str, dict[str, Any]]
"""By group (``model``, ``parallel``, ``data``, ``training``), then by name."""

_NAMES: Mapping[str, str] = {
    "model": """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
        seq_length padded_vocab_size untie_embeddings_and_output_weights position_embedding_type
        rotary_base rotary_percent normalization layernorm_epsilon swiglu squared_relu
        add_bias_linear add_qkv_bias qk_layernorm attention_dropout hidden_dropout init_method_std
        num_experts moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size
        moe_router_topk moe_router_score_function moe_router_load_balancing_type moe_aux_loss_coeff
        moe_expert_capacity_factor multi_latent_attention q_lora_rank kv_lora_rank mtp_num_layers
        hybrid_layer_pattern mamba_state_dim mamba_head_dim
        bf16 fp16 fp8 fp8_recipe fp8_param_gather fp4""",
    "parallel": """
        tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
        use_megatron_fsdp data_parallel_sharding_strategy num_distributed_optimizer_instances""",
    "data": "mock_data split tokenizer_type tokenizer_model",
    "training": """
        seed train_iters micro_batch_size global_batch_size rampup_batch_size optimizer lr min_lr
        lr_decay_style lr_warmup_iters weight_decay clip_grad adam_beta1 adam_beta2 adam_eps""",
}


def of_megatron() -> Setup:
    """The setup of the run in this process; empty if Megatron has no arguments."""
    try:
        args = _ARGS.find()()
    except AssertionError:
        # A custom training loop: it calls Megatron's functions and parses no flags.
        return {}
    setup = {
        group: {name: getattr(args, name, None) for name in names.split()}
        for group, names in _NAMES.items()
    }
    setup["data"]["data_path"] = [dataset(word) for word in args.data_path or ()]
    return setup


def dataset(prefix: str) -> str:
    """A dataset by name and size, wherever it lies; a word that is no dataset stays as it is."""
    path = Path(f"{prefix}.bin")
    try:
        return f"{path.name} of {path.stat().st_size:,} bytes"
    except OSError:
        return prefix
