"""One change to a run that keeps every rule, for each way to break one.

``rule_messages.txt`` beside this file has what each then says; see ``test_rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What breaks ``rule``, alone."""

    rule: str
    change: dict[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    graph: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = {**self.change, **self.graph, **self.variables, **self.versions}
        words = (f"{name}={value}" for name, value in changed.items())
        return f"{self.rule}: {' '.join([*words, *self.layers])}"


DROP_AND_PAD: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
_ATTENTION_AND_ROUTER: dict[str, Any] = {"cuda_graph_modules": ("attn", "moe_router")}
_ROUTER: dict[str, Any] = {"cuda_graph_modules": ("moe_router", "moe_preprocess")}
_GROUPED: dict[str, Any] = {"moe_grouped_gemm": True, "add_bias_linear": False}
_DROPLESS: dict[str, Any] = {**_GROUPED, "cuda_graph_modules": ("attn", "moe")}
_BOUNDED: dict[str, Any] = {**_DROPLESS, "expert_model_parallel_size": 2}
_FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
_SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
_FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "num_experts": None,
    "cuda_graph_modules": ("attn", "mlp"),
}
_TORCH: dict[str, Any] = {"cg_grouped_gemm": "torch"}
_ROWS: dict[str, Any] = {**_TORCH, "cg_moe_rows": 1.25}
_PEERS: dict[str, Any] = {**_TORCH, "cg_moe_exchange": "peer"}
_NATIVE: dict[str, Any] = {"cg_backend": "native"}

FSDP = (
    Case("implementation", {"cuda_graph_impl": "local"}),
    Case("double-buffer", {"fsdp_double_buffer": False}),
    Case("persistent-fallback", {"fsdp_db_use_persist_buf_on_alloc_fail": False}),
    Case("gradient-accumulation-fusion", {**_FUSED, "data_parallel_sharding_strategy": "optim"}),
    Case(
        "gradient-accumulation-fusion",
        {**_FUSED, "mtp_use_repeated_layer": True, "mtp_num_layers": 2},
    ),
    Case("gradient-accumulation-fusion", {**_FUSED, "gradient_ranks": 1}),
    Case("gradient-accumulation-fusion", {**_FUSED, "megatron_fsdp_main_grads_dtype": "fp32"}),
    Case("gradient-accumulation-fusion", {**_FUSED, "megatron_fsdp_grad_comm_dtype": "fp32"}),
    Case("gradient-accumulation-fusion", {**_FUSED, "transformer_impl": "local"}),
    Case("gradient-accumulation-fusion", {**_FUSED, "use_transformer_engine_op_fuser": True}),
    Case("expert-parallel-overlap", {"overlap_moe_expert_parallel_comm": True}),
    Case("delayed-weight-gradients", {"delay_wgrad_compute": True}),
    Case("optimizer-graph", {"optimizer_cuda_graph": True}),
    Case("pipeline-parallel", {"pipeline_model_parallel_size": 2}),
)

SCOPES = (
    Case("moe-and-router", {**DROP_AND_PAD, "cuda_graph_modules": ("moe", "moe_router")}),
    Case("preprocess-without-router", {"cuda_graph_modules": ("attn", "moe_preprocess")}),
    Case("moe-without-experts", {"num_experts": None}),
    Case("moe-without-drop-and-pad", {"cuda_graph_modules": ("attn", "moe")}),
    Case(
        "moe-without-drop-and-pad",
        {"cuda_graph_modules": ("attn", "moe"), "moe_expert_capacity_factor": 1.0},
    ),
    Case("preprocess-synchronizes", {**_ROUTER, "moe_expert_capacity_factor": 1.0}),
    Case("preprocess-synchronizes", {**_ROUTER, "moe_router_padding_for_fp8": True}),
    Case("scope-selects-nothing", {"cuda_graph_modules": ("attn", "mlp")}),
    Case(
        "scope-selects-nothing",
        {"cuda_graph_modules": ("attn", "mlp"), "moe_layer_freq": (1, 1, 1, 1)},
    ),
)

SCOPES_BEYOND_MEGATRON = (
    Case("preprocess-synchronizes", {**_ROUTER, "moe_router_padding_for_quantization": True}),
    Case("scope-selects-nothing", {"cuda_graph_modules": ("attn", "mamba")}),
    Case("scope-selects-nothing", {**_ATTENTION_AND_ROUTER, "hybrid_layer_pattern": "E|E/**"}),
    Case("scope-selects-nothing", {"moe_layer_freq": (0, 0, 1, 1)}, layers=("moe_router:0-1",)),
    Case("whole-moe-layer", {"cuda_graph_modules": ()}),
    Case(
        "whole-moe-layer",
        {"cuda_graph_modules": (), "moe_layer_freq": (0, 1, 1, 1)},
        layers=("layer:0,2-",),
    ),
    Case("cg-layers", layers=("attn",)),
    Case("cg-layers", layers=("moe_router:2-9",)),
)

LAYERS = (
    Case("sinkhorn-router", {"moe_router_load_balancing_type": ("sinkhorn",)}),
    Case(
        "dispatcher-reads-counts",
        {
            **DROP_AND_PAD,
            "cuda_graph_modules": ("attn", "moe"),
            "moe_token_dispatcher_type": "allgather",
        },
    ),
    Case(
        "dispatcher-reads-counts",
        {**DROP_AND_PAD, "cuda_graph_modules": (), "moe_token_dispatcher_type": "allgather"},
    ),
    Case("routing-trace", {"moe_routing_trace_path": "traces"}),
    Case(
        "routing-trace",
        {**DROP_AND_PAD, "cuda_graph_modules": (), "moe_routing_trace_path": "traces"},
    ),
    Case("largest-attention-logits", {"qk_clip": True}),
    Case("largest-attention-logits", {"log_max_attention_logit": True}),
)

EXPERTS = (
    Case("grouped-gemm-without-experts", {**_GROUPED, "moe_grouped_gemm": False}, graph=_TORCH),
    Case(
        "grouped-gemm-without-experts",
        {**_GROUPED, "num_experts": None, "cuda_graph_modules": ("attn",)},
        graph=_TORCH,
    ),
    Case("grouped-gemm-dtype", {**_GROUPED, "bf16": False}, graph=_TORCH),
    Case("grouped-gemm-low-precision", {**_GROUPED, "fp8": "hybrid"}, graph=_TORCH),
    Case("grouped-gemm-low-precision", {**_GROUPED, "fp4": "e2m1"}, graph=_TORCH),
    Case("grouped-gemm-bias", {**_GROUPED, "add_bias_linear": True}, graph=_TORCH),
    Case(
        "grouped-gemm-op-fuser", {**_GROUPED, "use_transformer_engine_op_fuser": True}, graph=_TORCH
    ),
    Case("experts-dispatcher", {**_DROPLESS, "moe_token_dispatcher_type": "flex"}, graph=_TORCH),
    Case("experts-tensor-parallel", {**_DROPLESS, "expert_tensor_parallel_size": 2}, graph=_TORCH),
    Case(
        "experts-tensor-parallel",
        {**_GROUPED, "cuda_graph_modules": (), "expert_tensor_parallel_size": 2},
        graph=_TORCH,
    ),
    Case("experts-uneven", {**_DROPLESS, "moe_expert_capacity_factor": 1.0}, graph=_TORCH),
    Case("experts-uneven", {**_DROPLESS, "moe_router_padding_for_fp8": True}, graph=_TORCH),
    Case(
        "experts-uneven", {**_DROPLESS, "moe_router_padding_for_quantization": True}, graph=_TORCH
    ),
    Case(
        "experts-router",
        {**_DROPLESS, "moe_router_load_balancing_type": ("aux_loss", "quantile_balancing")},
        graph=_TORCH,
    ),
    Case("grouped-gemm-delayed-gradients", {**_GROUPED, "delay_wgrad_compute": True}, graph=_TORCH),
    Case(
        "experts-delayed-gradients",
        {**_GROUPED, "overlap_dispatch_backward_with_experts_wgrad": True},
        graph=_TORCH,
    ),
    Case(
        "experts-delayed-gradients",
        {
            **DROP_AND_PAD,
            "cuda_graph_modules": ("attn", "moe"),
            "overlap_dispatch_backward_with_experts_wgrad": True,
        },
    ),
)

ROWS = (
    Case("rows-below-average", _BOUNDED, graph={**_TORCH, "cg_moe_rows": 0.9}),
    Case("rows-below-average", _BOUNDED, graph={**_TORCH, "cg_moe_rows": float("nan")}),
    Case(
        "rows-without-experts",
        {**_BOUNDED, "cuda_graph_modules": ("attn", "moe_router")},
        graph=_ROWS,
    ),
    Case(
        "rows-without-experts",
        {**_BOUNDED, "cuda_graph_modules": ("attn", "moe_router")},
        graph={**_ROWS, "cg_grouped_gemm": "te"},
    ),
    Case("rows-without-experts", {**_BOUNDED, **DROP_AND_PAD}, graph=_ROWS),
    Case(
        "rows-without-expert-parallel", {**_DROPLESS, "expert_model_parallel_size": 1}, graph=_ROWS
    ),
)

PEERS = (
    Case(
        "exchange-without-experts",
        {**_BOUNDED, "cuda_graph_modules": ("attn", "moe_router")},
        graph=_PEERS,
    ),
    Case("exchange-without-experts", _BOUNDED, graph={**_PEERS, "cg_grouped_gemm": "te"}),
    Case("exchange-without-experts", {**_BOUNDED, **DROP_AND_PAD}, graph=_PEERS),
    Case(
        "exchange-without-expert-parallel",
        {**_DROPLESS, "expert_model_parallel_size": 1},
        graph=_PEERS,
    ),
)

RECOMPUTE = (
    Case("full-recompute-of-parts", {**_FULL, "cuda_graph_modules": ("attn",)}),
    Case(
        "full-recompute-of-parts",
        {**_FULL, "num_experts": 8, "cuda_graph_modules": ("attn", "moe_router")},
    ),
    Case(
        "full-recompute-of-parts",
        {
            **_FULL,
            **DROP_AND_PAD,
            "num_experts": 8,
            "cuda_graph_modules": ("attn", "moe"),
            "moe_layer_freq": 2,
        },
    ),
    Case("full-recompute-of-parts", _FULL, layers=("attn:0-1",)),
    Case("full-recompute-of-parts", {**_FULL, "custom_layers": True}),
    Case("dropout-in-full-recompute", {**_FULL, "attention_dropout": 0.1}),
    Case("dropout-in-full-recompute", {**_FULL, "hidden_dropout": 0.1}),
    Case("jitter-in-full-recompute", {**_FULL, "moe_input_jitter_eps": 0.01}),
    Case("low-precision-full-recompute", {**_FULL, "fp8": "hybrid"}),
    Case("low-precision-full-recompute", {**_FULL, "fp4": "e2m1"}),
    Case(
        "full-recompute-of-parts",
        {**_FULL, "num_experts": 8, "moe_layer_freq": (0, 0, 0, 1), "mtp_num_layers": 1},
        layers=("attn:0-2",),
    ),
    Case("hybrid-full-recompute", {**_FULL, "hybrid_layer_pattern": "*-*-"}),
    Case(
        "repeated-prediction-full-recompute",
        {
            **_FULL,
            "recompute_method": "uniform",
            "mtp_use_repeated_layer": True,
            "mtp_num_layers": 2,
        },
    ),
    Case("distributed-full-recompute", {**_FULL, "distribute_saved_activations": True}),
    Case("moe-recompute-around-router", {**_SELECTIVE, "recompute_modules": ("moe",)}),
    Case("dropout-in-recomputed-attention", _SELECTIVE),
    Case(
        "dropout-in-recomputed-mlp",
        {
            **_SELECTIVE,
            "cuda_graph_modules": ("mlp",),
            "recompute_modules": ("mlp",),
            "num_experts": None,
        },
    ),
    Case(
        "dropout-in-recomputed-mlp",
        {
            **_SELECTIVE,
            **DROP_AND_PAD,
            "cuda_graph_modules": ("moe",),
            "recompute_modules": ("moe",),
        },
    ),
    Case(
        "jitter-in-recomputed-moe",
        {
            **_SELECTIVE,
            **DROP_AND_PAD,
            "cuda_graph_modules": ("moe",),
            "recompute_modules": ("moe",),
            "hidden_dropout": 0.0,
            "moe_input_jitter_eps": 0.01,
        },
    ),
    Case("cpu-offloading", {"cpu_offloading": True}),
)

NUMERICS = (
    Case("activation-offloading", {"fine_grained_activation_offloading": True}),
    Case("fp16", {"bf16": False, "fp16": True}),
    Case("fp8-primary-weights", {"fp8": "hybrid", "fp8_param_gather": True}),
    Case(
        "fp8-primary-weights-recipe",
        {
            "fp8": "e4m3",
            "fp8_recipe": "blockwise",
            "fp8_param_gather": True,
            "keep_fp8_transpose_cache": True,
        },
    ),
    Case("packed-sequences", {**_ATTENTION_AND_ROUTER, "sft": True}),
    Case("packed-sequences", {**_ATTENTION_AND_ROUTER, "rl_use_sequence_packing": True}),
    Case("packed-sequences", {**_ATTENTION_AND_ROUTER, "dataloader_inter_document_masking": True}),
    Case("packed-sequences", {"cuda_graph_modules": (), "sft": True, "num_experts": None}),
    Case(
        "packed-mamba",
        {
            "cuda_graph_modules": ("mamba",),
            "sft": True,
            "hybrid_layer_pattern": "M*",
            "num_experts": None,
        },
    ),
    Case(
        "packed-microbatches",
        {"cuda_graph_modules": ("moe_router",), "sft": True, "micro_batch_size": 2},
    ),
    Case(
        "pack-sequences-hybrid",
        {"cuda_graph_modules": ("attn",), "hybrid_layer_pattern": "M*-", "num_experts": None},
        graph={"cg_pack_sequences": 8},
    ),
    Case("pack-sequences-least", graph={"cg_pack_sequences": 0}),
    Case(
        "pack-sequences-context-parallel",
        {**_ATTENTION_AND_ROUTER, "context_parallel_size": 2},
        graph={"cg_pack_sequences": 8},
    ),
    Case("hybrid-context-parallel", {"hybrid_context_parallel": True}),
)

BACKEND = (
    Case("flags-without-graphs", {"cuda_graph_impl": "none"}, layers=("attn:0",)),
    Case("native-backend-fp8", {"fp8": "hybrid"}, graph=_NATIVE),
    Case("native-backend-fp8", {"fp4": "e2m1"}, graph=_NATIVE),
    Case(
        "expandable-segments",
        graph=_NATIVE,
        variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
)

ENVIRONMENT = (
    Case("transformer-engine-version", versions={"transformer-engine": "2.18.0"}),
    Case("transformer-engine-version", versions={"transformer-engine": None}),
    Case("megatron-core-version", versions={"megatron-core": "0.18.2"}),
    Case("expandable-segments", variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Case(
        "expandable-segments",
        variables={
            "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True",
            "NCCL_GRAPH_REGISTER": "1",
        },
    ),
    Case("max-connections", variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
)

MEGATRON_AGREES = (*SCOPES, *RECOMPUTE)
"""The cases that ``TransformerConfig`` of megatron-core must refuse too."""

ALL = (
    *FSDP,
    *SCOPES,
    *SCOPES_BEYOND_MEGATRON,
    *LAYERS,
    *EXPERTS,
    *ROWS,
    *PEERS,
    *RECOMPUTE,
    *NUMERICS,
    *BACKEND,
    *ENVIRONMENT,
)
