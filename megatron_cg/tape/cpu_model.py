"""A real megatron-core GPTModel under the real Megatron-FSDP, small enough for a CPU."""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_cg.extensions import allow_graphs_under_v2
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import undone_after

_OUTER = "num_distributed_optimizer_instances"
"""How many groups of ranks hold all shards each; Megatron's groups and its config must agree."""


def transformer_config(model: CpuModelConfig) -> TransformerConfig:
    moe: dict[str, object] = {}
    if model.experts:
        moe = {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.topk,
            "moe_aux_loss_coeff": 1e-2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": model.grouped is not None,
            "expert_model_parallel_size": model.expert_parallel,
            "moe_ffn_hidden_size": model.ffn_hidden_size,
        }
    fields: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.heads,
        "tensor_model_parallel_size": model.tensor_parallel,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
        "bf16": model.bf16,
        "params_dtype": torch.bfloat16 if model.bf16 else torch.float32,
        "pipeline_dtype": torch.bfloat16 if model.bf16 else torch.float32,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        # gloo lacks PREMUL_SUM; FSDP would reduce with it if it scaled the gradients itself. v2
        # takes the average.
        "calculate_per_token_loss": not model.under_v2,
        # Costs nothing until layers get graphs, and eager runs then build the same model.
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": list(model.graph_modules),
    }
    return TransformerConfig(**{**fields, **moe, **model.options})


def ddp_config(model: CpuModelConfig) -> DistributedDataParallelConfig:
    """Return the FSDP options that graphs need, overridden by ``model.fsdp_options``."""
    options: dict[str, object] = {
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": not model.under_v2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "fsdp_double_buffer": not model.under_v2,
        "fsdp_db_use_persist_buf_on_alloc_fail": not model.under_v2,
        **model.fsdp_options,
    }
    return DistributedDataParallelConfig(**options)


def build(model: CpuModelConfig) -> Any:
    """Build and shard the model; needs cpu_fakes and an initialised default process group."""
    parallel_state.initialize_model_parallel(
        model.tensor_parallel,
        expert_model_parallel_size=model.expert_parallel,
        **{_OUTER: model.fsdp_options.get(_OUTER, 1)},
    )
    tensor_parallel.model_parallel_cuda_manual_seed(model.seed)
    torch.manual_seed(model.seed)
    on_meta = model.options.get("init_model_with_meta_device", False)
    with torch.device("meta") if on_meta else nullcontext():
        made: Any = gpt_model(model)
    options = {"config": made.config, "ddp_config": ddp_config(model), "module": made}
    if model.under_v2:
        options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    with undone_after(allow_graphs_under_v2()):
        return FullyShardedDataParallel(**options)


def gpt_model(model: CpuModelConfig) -> torch.nn.Module:
    config = transformer_config(model)
    layer = get_gpt_layer_local_spec(
        num_experts=model.experts or None,
        moe_grouped_gemm=False,
        normalization=config.normalization,
    )
    if model.grouped is not None:
        layer.submodules.mlp = model.grouped(layer.submodules.mlp)
    # From a layer spec alone, Megatron would use TE's final norm wherever TE is installed.
    spec = TransformerBlockSubmodules([layer] * model.layers, WrappedTorchNorm)
    gpt: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocabulary,
        max_sequence_length=model.sequence_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    return Float16Module(config, gpt) if model.bf16 else gpt


def transformer_layers(model: torch.nn.Module) -> list[TransformerLayer]:
    """Return the model's transformer layers, the FSDP units, in the order they run."""
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]
