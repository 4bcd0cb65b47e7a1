"""What a record holds of a run: its setup, and digests of its parameter shards.

Compared runs must agree on the setup: what is trained, on which data and in which layout.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.megatron_fsdp import find_megatron_fsdp
from megatron_cg.fsdp.roles import fsdp_class
from megatron_cg.upstream.symbols import Symbol

_ARGS = Symbol("megatron.training.global_vars:get_args", "the run's arguments")
_BUFFERS = {
    "main": "main_weight_buffer",
    "model": "model_weight_buffer",
    "transpose": "transpose_weight_buffer",
}
RELIES_ON = (
    _ARGS,
    *fsdp_class("ParamAndGradBuffer", "parameter_groups", "param_to_name"),
    *fsdp_class("ParameterGroup", "params", *_BUFFERS.values()),
    *fsdp_class("DataParallelBuffer", "get_item", "is_data_distributed"),
)

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


def parameter_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of this rank's shard of every parameter, by ``<weights>:<parameter name>``.

    Under Megatron-FSDP the weights are ``main`` (updated by the optimizer), ``model`` (used by the
    layers) and, with FP8 parameters, ``transpose``. Without Megatron-FSDP, and for parameters that
    are not sharded, they are ``parameter``. Waits for the device.
    """
    if torch.cuda.is_available():
        # If weights are not sharded, the last step's all-gather may still be in flight on its own
        # stream.
        torch.cuda.synchronize()
    fsdp: Any = find_megatron_fsdp(model)
    if fsdp is None:
        return {f"parameter:{name}": digest(value) for name, value in model.named_parameters()}
    buffer = fsdp.param_and_grad_buffer
    digests: dict[str, str] = {}
    for group in buffer.parameter_groups:
        kinds = {kind: getattr(group, name) for kind, name in _BUFFERS.items()}
        present = {kind: weights for kind, weights in kinds.items() if weights is not None}
        # If only some of a group's weights are sharded (ZeRO-1 and 2), the others also hold copies
        # of weights that other ranks own. The next all-gather renews them, so their state at the
        # end of a run is random. This rank digests only the weights it owns.
        only_own = any(weights.is_data_distributed for weights in present.values())
        for item, parameter in enumerate(group.params):
            name = buffer.param_to_name[parameter]
            if not present:
                digests[f"parameter:{name}"] = digest(parameter)
            for kind, weights in present.items():
                value = weights.get_item(item, only_shard=only_own)
                digests[f"{kind}:{name}"] = digest(value)
    return digests


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes, for any dtype and device."""
    value = tensor.detach()
    local = getattr(value, "to_local", None)
    value = (local() if local is not None else value).cpu().contiguous()
    hashed = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    hashed.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
