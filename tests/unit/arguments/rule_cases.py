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


def case(
    rule: str,
    *bases: dict[str, Any],
    layers: tuple[str, ...] = (),
    graph: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    versions: dict[str, str | None] | None = None,
    **change: Any,
) -> Case:
    """A case whose change is that of all ``bases``, and ``change``."""
    settings = {name: value for base in (*bases, change) for name, value in base.items()}
    return Case(rule, settings, layers, graph or {}, variables or {}, versions or {})


DROP_AND_PAD: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
_ATTENTION_AND_ROUTER: dict[str, Any] = {"cuda_graph_modules": ("attn", "moe_router")}
_ROUTER: dict[str, Any] = {"cuda_graph_modules": ("moe_router", "moe_preprocess")}
_GROUPED: dict[str, Any] = {"moe_grouped_gemm": True, "add_bias_linear": False}
_DROPLESS: dict[str, Any] = {**_GROUPED, "cuda_graph_modules": ("attn", "moe")}
_BOUNDED: dict[str, Any] = {**_DROPLESS, "expert_model_parallel_size": 2}
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
    case("implementation", cuda_graph_impl="local"),
    case("double-buffer", fsdp_double_buffer=False),
    case("persistent-fallback", fsdp_db_use_persist_buf_on_alloc_fail=False),
    case("gradient-accumulation-fusion", gradient_accumulation_fusion=True),
    case("expert-parallel-overlap", overlap_moe_expert_parallel_comm=True),
    case("delayed-weight-gradients", delay_wgrad_compute=True),
    case("optimizer-graph", optimizer_cuda_graph=True),
    case("pipeline-parallel", pipeline_model_parallel_size=2),
)

SCOPES = (
    case("moe-and-router", DROP_AND_PAD, cuda_graph_modules=("moe", "moe_router")),
    case("preprocess-without-router", cuda_graph_modules=("attn", "moe_preprocess")),
    case("moe-without-experts", num_experts=None),
    case("moe-without-drop-and-pad", cuda_graph_modules=("attn", "moe")),
    case(
        "moe-without-drop-and-pad",
        cuda_graph_modules=("attn", "moe"),
        moe_expert_capacity_factor=1.0,
    ),
    case("preprocess-synchronizes", _ROUTER, moe_expert_capacity_factor=1.0),
    case("preprocess-synchronizes", _ROUTER, moe_router_padding_for_fp8=True),
    case("scope-selects-nothing", cuda_graph_modules=("attn", "mlp")),
    case("scope-selects-nothing", cuda_graph_modules=("attn", "mlp"), moe_layer_freq=(1, 1, 1, 1)),
)

SCOPES_BEYOND_MEGATRON = (
    case("preprocess-synchronizes", _ROUTER, moe_router_padding_for_quantization=True),
    case("preprocess-shared-expert", _ROUTER, moe_shared_expert_overlap=True),
    case("scope-selects-nothing", cuda_graph_modules=("attn", "mamba")),
    case("scope-selects-nothing", _ATTENTION_AND_ROUTER, hybrid_layer_pattern="E|E/**"),
    case("scope-selects-nothing", layers=("moe_router:0-1",), moe_layer_freq=(0, 0, 1, 1)),
    case("whole-moe-layer", cuda_graph_modules=()),
    case(
        "whole-moe-layer",
        layers=("layer:0,2-",),
        cuda_graph_modules=(),
        moe_layer_freq=(0, 1, 1, 1),
    ),
    case("cg-layers", layers=("attn",)),
    case("cg-layers", layers=("moe_router:2-9",)),
)

LAYERS = (
    case("sinkhorn-router", moe_router_load_balancing_type=("sinkhorn",)),
    case(
        "dispatcher-reads-counts",
        DROP_AND_PAD,
        cuda_graph_modules=("attn", "moe"),
        moe_token_dispatcher_type="allgather",
    ),
    case(
        "dispatcher-reads-counts",
        DROP_AND_PAD,
        cuda_graph_modules=(),
        moe_token_dispatcher_type="allgather",
    ),
    case("routing-trace", moe_routing_trace_path="traces"),
    case("routing-trace", DROP_AND_PAD, cuda_graph_modules=(), moe_routing_trace_path="traces"),
    case("largest-attention-logits", qk_clip=True),
    case("largest-attention-logits", log_max_attention_logit=True),
)

EXPERTS = (
    case("grouped-gemm-without-experts", _GROUPED, graph=_TORCH, moe_grouped_gemm=False),
    case(
        "grouped-gemm-without-experts",
        _GROUPED,
        graph=_TORCH,
        num_experts=None,
        cuda_graph_modules=("attn",),
    ),
    case("grouped-gemm-dtype", _GROUPED, graph=_TORCH, bf16=False),
    case("grouped-gemm-low-precision", _GROUPED, graph=_TORCH, fp8="hybrid"),
    case("grouped-gemm-low-precision", _GROUPED, graph=_TORCH, fp4="e2m1"),
    case("grouped-gemm-bias", _GROUPED, graph=_TORCH, add_bias_linear=True),
    case("grouped-gemm-op-fuser", _GROUPED, graph=_TORCH, use_transformer_engine_op_fuser=True),
    case("experts-dispatcher", _DROPLESS, graph=_TORCH, moe_token_dispatcher_type="flex"),
    case("experts-tensor-parallel", _DROPLESS, graph=_TORCH, expert_tensor_parallel_size=2),
    case(
        "experts-tensor-parallel",
        _GROUPED,
        graph=_TORCH,
        cuda_graph_modules=(),
        expert_tensor_parallel_size=2,
    ),
    case("experts-uneven", _DROPLESS, graph=_TORCH, moe_expert_capacity_factor=1.0),
    case("experts-uneven", _DROPLESS, graph=_TORCH, moe_router_padding_for_fp8=True),
    case("experts-uneven", _DROPLESS, graph=_TORCH, moe_router_padding_for_quantization=True),
    case(
        "experts-router",
        _DROPLESS,
        graph=_TORCH,
        moe_router_load_balancing_type=("aux_loss", "quantile_balancing"),
    ),
    case(
        "experts-delayed-gradients",
        _GROUPED,
        graph=_TORCH,
        overlap_dispatch_backward_with_experts_wgrad=True,
    ),
    case(
        "experts-delayed-gradients",
        DROP_AND_PAD,
        cuda_graph_modules=("attn", "moe"),
        overlap_dispatch_backward_with_experts_wgrad=True,
    ),
)

ROWS = (
    case("rows-below-average", _BOUNDED, graph={**_TORCH, "cg_moe_rows": 0.9}),
    case("rows-below-average", _BOUNDED, graph={**_TORCH, "cg_moe_rows": float("nan")}),
    case("rows-without-experts", _BOUNDED, graph=_ROWS, cuda_graph_modules=("attn", "moe_router")),
    case(
        "rows-without-experts",
        _BOUNDED,
        graph={**_ROWS, "cg_grouped_gemm": "te"},
        cuda_graph_modules=("attn", "moe_router"),
    ),
    case("rows-without-experts", _BOUNDED, DROP_AND_PAD, graph=_ROWS),
    case("rows-without-expert-parallel", _DROPLESS, graph=_ROWS, expert_model_parallel_size=1),
)

PEERS = (
    case(
        "exchange-without-experts",
        _BOUNDED,
        graph=_PEERS,
        cuda_graph_modules=("attn", "moe_router"),
    ),
    case("exchange-without-experts", _BOUNDED, graph={**_PEERS, "cg_grouped_gemm": "te"}),
    case("exchange-without-experts", _BOUNDED, DROP_AND_PAD, graph=_PEERS),
    case("exchange-without-expert-parallel", _DROPLESS, graph=_PEERS, expert_model_parallel_size=1),
)

RECOMPUTE = (
    case("full-recompute-of-parts", _FULL, cuda_graph_modules=("attn",)),
    case(
        "full-recompute-of-parts", _FULL, num_experts=8, cuda_graph_modules=("attn", "moe_router")
    ),
    case(
        "full-recompute-of-parts",
        _FULL,
        DROP_AND_PAD,
        num_experts=8,
        cuda_graph_modules=("attn", "moe"),
        moe_layer_freq=2,
    ),
    case("full-recompute-of-parts", _FULL, layers=("attn:0-1",)),
    case("full-recompute-of-parts", _FULL, custom_layers=True),
    case("dropout-in-full-recompute", _FULL, attention_dropout=0.1),
    case("dropout-in-full-recompute", _FULL, hidden_dropout=0.1),
    case("jitter-in-full-recompute", _FULL, moe_input_jitter_eps=0.01),
    case("low-precision-full-recompute", _FULL, fp8="hybrid"),
    case("low-precision-full-recompute", _FULL, fp4="e2m1"),
    case(
        "full-recompute-of-parts",
        _FULL,
        layers=("attn:0-2",),
        num_experts=8,
        moe_layer_freq=(0, 0, 0, 1),
        mtp_num_layers=1,
    ),
    case("hybrid-full-recompute", _FULL, hybrid_layer_pattern="*-*-"),
    case(
        "repeated-prediction-full-recompute",
        _FULL,
        recompute_method="uniform",
        mtp_use_repeated_layer=True,
        mtp_num_layers=2,
    ),
    case("distributed-full-recompute", _FULL, distribute_saved_activations=True),
    case("moe-recompute-around-router", _SELECTIVE, recompute_modules=("moe",)),
    case("dropout-in-recomputed-attention", _SELECTIVE),
    case(
        "dropout-in-recomputed-mlp",
        _SELECTIVE,
        cuda_graph_modules=("mlp",),
        recompute_modules=("mlp",),
        num_experts=None,
    ),
    case(
        "dropout-in-recomputed-mlp",
        _SELECTIVE,
        DROP_AND_PAD,
        cuda_graph_modules=("moe",),
        recompute_modules=("moe",),
    ),
    case("cpu-offloading", cpu_offloading=True),
)

NUMERICS = (
    case("activation-offloading", fine_grained_activation_offloading=True),
    case("fp16", bf16=False, fp16=True),
    case("fp8-primary-weights", fp8="hybrid", fp8_param_gather=True),
    case(
        "fp8-primary-weights-recipe",
        fp8="e4m3",
        fp8_recipe="blockwise",
        fp8_param_gather=True,
        keep_fp8_transpose_cache=True,
    ),
    case("packed-sequences", _ATTENTION_AND_ROUTER, sft=True),
    case("packed-sequences", _ATTENTION_AND_ROUTER, rl_use_sequence_packing=True),
    case("packed-sequences", _ATTENTION_AND_ROUTER, dataloader_inter_document_masking=True),
    case("packed-sequences", cuda_graph_modules=(), sft=True, num_experts=None),
    case("packed-sequences", cuda_graph_modules=("mamba",), sft=True, hybrid_layer_pattern="M*-"),
    case("packed-microbatches", cuda_graph_modules=("moe_router",), sft=True, micro_batch_size=2),
)

BACKEND = (
    case("flags-without-graphs", layers=("attn:0",), cuda_graph_impl="none"),
    case("native-backend-fp8", graph=_NATIVE, fp8="hybrid"),
    case("native-backend-fp8", graph=_NATIVE, fp4="e2m1"),
    case(
        "expandable-segments",
        graph=_NATIVE,
        variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
)

ENVIRONMENT = (
    case("transformer-engine-version", versions={"transformer-engine": "2.18.0"}),
    case("transformer-engine-version", versions={"transformer-engine": None}),
    case("megatron-core-version", versions={"megatron-core": "0.18.2"}),
    case("expandable-segments", variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    case(
        "expandable-segments",
        variables={
            "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True",
            "NCCL_GRAPH_REGISTER": "1",
        },
    ),
    case("max-connections", variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
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
