"""One change to a run that keeps every rule, for each way to break one.

``rule_messages.txt`` beside this file has what each then says; see ``test_rules.py``.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_cg.arguments.schema import BACKENDS, Environment, GraphArguments, RunArguments
from megatron_cg.upstream.te import NOT_LOADED
from tests.unit.arguments.good_configuration import GOOD_ENVIRONMENT, GOOD_RUN


@dataclass(frozen=True)
class Case:
    """What breaks ``rule``, alone: settings of Megatron, our flags, variables and versions."""

    rule: str
    change: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.rule}: {' '.join(f'{name}={value}' for name, value in self.change.items())}"

    def configured(self) -> tuple[RunArguments, GraphArguments, Environment]:
        ours = {name: v for name, v in self.change.items() if name.startswith("cg_")}
        versions = {name: v for name, v in self.change.items() if name in GOOD_ENVIRONMENT.versions}
        variables = {name: v for name, v in self.change.items() if name.isupper()}
        found_in = {*ours, *versions, *variables, "lacks_device_counts", "without"}
        others = self.change.keys() - found_in
        graph = GraphArguments(**ours)
        found = {**GOOD_ENVIRONMENT.versions, **versions}
        environment = Environment(
            versions={name: version for name, version in found.items() if version is not None},
            variables=variables,
            backend=BACKENDS[graph.cg_backend],
            lacks_device_counts=self.change.get("lacks_device_counts", NOT_LOADED),
            without=self.change.get("without", ()),
        )
        run = dataclasses.replace(GOOD_RUN, **{name: self.change[name] for name in others})
        return run, graph, environment


def case(rule: str, *bases: dict[str, Any], **change: Any) -> Case:
    """A case whose change is that of all ``bases``, and ``change``."""
    return Case(rule, {name: value for base in (*bases, change) for name, value in base.items()})


DROP_AND_PAD: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
WHOLE: dict[str, Any] = {"cuda_graph_modules": ()}
EXPERTS: dict[str, Any] = {"cuda_graph_modules": ("attn", "moe")}
DENSE: dict[str, Any] = {"cuda_graph_modules": ("attn", "mlp"), "num_experts": None}
TORCH: dict[str, Any] = {
    "cg_grouped_gemm": "torch",
    "moe_grouped_gemm": True,
    "add_bias_linear": False,
}
DROPLESS: dict[str, Any] = {**TORCH, **EXPERTS}
CUBLAS: dict[str, Any] = {
    **EXPERTS,
    **TORCH,
    "cg_grouped_gemm": "cublas",
    "lacks_device_counts": "",
}
PADDED: dict[str, Any] = {**DROP_AND_PAD, **EXPERTS, "moe_grouped_gemm": True}
SHARED: dict[str, Any] = {**DROPLESS, "expert_model_parallel_size": 2}
ROWS: dict[str, Any] = {"cg_moe_rows": 1.25}
PEER: dict[str, Any] = {"cg_moe_exchange": "peer"}
UNDER_V2: dict[str, Any] = {
    "megatron_fsdp_version": 2,
    "fsdp_double_buffer": False,
    "fsdp_db_use_persist_buf_on_alloc_fail": False,
}
FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
DELAYED: dict[str, Any] = {"overlap_dispatch_backward_with_experts_wgrad": True}
REPEATED: dict[str, Any] = {"mtp_use_repeated_layer": True, "mtp_num_layers": 2}

LATER = ("moe_use_grouped_tensor", "megatron_fsdp_version")
"""Settings of megatron-core 0.20 that 0.19.2 lacks."""

ALL = (
    case("flags-without-graphs", cg_layers=("attn:0",), cuda_graph_impl="none"),
    case("implementation", cuda_graph_impl="local"),
    case("double-buffer", fsdp_double_buffer=False),
    case("persistent-fallback", fsdp_db_use_persist_buf_on_alloc_fail=False),
    case("v2-persistent-fallback", megatron_fsdp_version=2),
    case("v2-symmetric-memory", UNDER_V2, nccl_ub=True),
    case("gradient-accumulation-fusion", gradient_accumulation_fusion=True),
    case("expert-parallel-overlap", overlap_moe_expert_parallel_comm=True),
    case("optimizer-graph", optimizer_cuda_graph=True),
    case("pipeline-parallel", pipeline_model_parallel_size=2),
    case("fp16", fp16=True),
    case("fp8-primary-weights", fp8="hybrid", fp8_param_gather=True),
    case(
        "fp8-primary-weights-recipe",
        fp8="e4m3",
        fp8_recipe="blockwise",
        fp8_param_gather=True,
        keep_fp8_transpose_cache=True,
    ),
    case("native-backend-fp8", cg_backend="native", fp8="hybrid"),
    case("native-backend-fp8", cg_backend="native", fp4="e2m1"),
    case(
        "preprocess-shared-expert",
        cuda_graph_modules=("moe_router", "moe_preprocess"),
        moe_shared_expert_overlap=True,
    ),
    case("scope-selects-nothing", cuda_graph_modules=("mlp",)),
    case(
        "scope-selects-nothing",
        cuda_graph_modules=("moe_router",),
        cg_layers=("moe_router:0-1",),
        moe_layer_freq=(0, 0, 1, 1),
    ),
    case("cg-layers", cg_layers=("attn",)),
    case("cg-layers", cg_layers=("moe_router:2-9",)),
    case("cg-layers", cg_layers=("mlp:0-1,3", "attn:4-")),
    case("cg-layers", cg_layers=("bad:0", "moe_router:3-1,x")),
    case("cg-layers", WHOLE, num_experts=None, cg_layers=("attn:0-3",)),
    case("full-recompute-of-parts", FULL, DENSE, cuda_graph_modules=("attn",)),
    case("full-recompute-of-parts", FULL),
    case("full-recompute-of-parts", FULL, DROP_AND_PAD, EXPERTS, moe_layer_freq=2),
    case("full-recompute-of-parts", FULL, DENSE, cg_layers=("attn:0-1",)),
    case("full-recompute-of-parts", FULL, DENSE, custom_layers=True),
    case("full-recompute", FULL, DENSE, attention_dropout=0.1),
    case("full-recompute", FULL, DENSE, hidden_dropout=0.1),
    case("full-recompute", FULL, DENSE, moe_input_jitter_eps=0.01),
    case("full-recompute", FULL, DENSE, fp8="hybrid"),
    case("full-recompute", FULL, DENSE, fp4="e2m1"),
    case("full-recompute", FULL, DENSE, hybrid_layer_pattern="*-*-"),
    case("full-recompute", FULL, DENSE, REPEATED, recompute_method="uniform"),
    case(
        "recompute-of-attention",
        recompute_granularity="selective",
        sequence_parallel=True,
        hidden_dropout=0.1,
    ),
    case("recompute-of-mhc", recompute_granularity="selective", recompute_modules=("mhc",)),
    case("activation-offloading", fine_grained_activation_offloading=True),
    case("routing-replay", moe_enable_routing_replay=True),
    case("sinkhorn-router", moe_router_load_balancing_type=("sinkhorn",)),
    case("sinkhorn-router", DROP_AND_PAD, WHOLE, moe_router_load_balancing_type=("sinkhorn",)),
    case("largest-attention-logits", qk_clip=True),
    case("largest-attention-logits", log_max_attention_logit=True),
    case("packed-sequences", packs_sequences=True),
    case("packed-sequences", WHOLE, packs_sequences=True, num_experts=None),
    case(
        "packed-sequences",
        cuda_graph_modules=("mamba",),
        packs_sequences=True,
        hybrid_layer_pattern="M*",
        num_experts=None,
    ),
    case("grouped-gemm", TORCH, moe_grouped_gemm=False),
    case("grouped-gemm", TORCH, num_experts=None, cuda_graph_modules=("attn",)),
    case("grouped-gemm", TORCH, bf16=False),
    case("grouped-gemm", TORCH, fp8="hybrid"),
    case("grouped-gemm", TORCH, fp4="e2m1"),
    case("grouped-gemm", TORCH, add_bias_linear=True),
    case("grouped-gemm", TORCH, use_transformer_engine_op_fuser=True),
    case("experts-delayed-gradients", TORCH, DELAYED),
    case("experts-delayed-gradients", DROP_AND_PAD, EXPERTS, DELAYED),
    case("moe-without-drop-and-pad", EXPERTS),
    case("moe-without-drop-and-pad", EXPERTS, moe_expert_capacity_factor=1.0),
    case("moe-without-drop-and-pad", WHOLE),
    case("moe-without-drop-and-pad", WHOLE, cg_layers=("layer:0,2-",), moe_layer_freq=(0, 1, 1, 1)),
    case("experts-capacity", DROPLESS, moe_expert_capacity_factor=1.25),
    case("moe-without-drop-and-pad", EXPERTS, fp8="hybrid"),
    case("moe-without-drop-and-pad", EXPERTS, fp4="e2m1"),
    case("grouped-gemm", CUBLAS, PEER, fp8="hybrid"),
    case("grouped-gemm", CUBLAS, lacks_device_counts="cuBLASLt is 13.1.0, before"),
    case("grouped-gemm", CUBLAS, lacks_device_counts="cuBLASLt is 12.9.1, before"),
    case("grouped-gemm", CUBLAS, moe_grouped_gemm=False),
    case("grouped-gemm", CUBLAS, bf16=False),
    case("grouped-gemm", CUBLAS, fp8="hybrid"),
    case("grouped-gemm", CUBLAS, fp4="e2m1"),
    case("grouped-gemm", CUBLAS, add_bias_linear=True),
    case("grouped-gemm", CUBLAS, NVTE_USE_CUTLASS_GROUPED_GEMM="1"),
    case("grouped-gemm", CUBLAS, num_experts=256, expert_model_parallel_size=2),
    case("experts-dispatcher", CUBLAS, moe_token_dispatcher_type="flex"),
    case(
        "experts-grouped-tensor",
        CUBLAS,
        fp8="e4m3",
        fp8_recipe="blockwise",
        moe_router_padding_for_quantization=True,
    ),
    case("experts-grouped-tensor", DROPLESS, moe_use_grouped_tensor=True),
    case("experts-grouped-tensor", PADDED, moe_use_grouped_tensor=True),
    case("experts-grouped-tensor", PADDED, WHOLE, use_transformer_engine_op_fuser=True),
    case("experts-dispatcher", DROPLESS, moe_token_dispatcher_type="flex"),
    case("experts-dispatcher", DROP_AND_PAD, EXPERTS, moe_token_dispatcher_type="allgather"),
    case("experts-dispatcher", DROP_AND_PAD, WHOLE, moe_token_dispatcher_type="allgather"),
    case("experts-tensor-parallel", DROPLESS, expert_tensor_parallel_size=2),
    case("experts-tensor-parallel", TORCH, WHOLE, expert_tensor_parallel_size=2),
    case(
        "experts-router",
        DROPLESS,
        moe_router_load_balancing_type=("aux_loss", "quantile_balancing"),
    ),
    case("rows-below-average", SHARED, cg_moe_rows=0.9),
    case("rows-below-average", SHARED, cg_moe_rows=float("nan")),
    case("no-exchange", SHARED, ROWS, cuda_graph_modules=("attn", "moe_router")),
    case("no-exchange", SHARED, ROWS, DROP_AND_PAD),
    case("no-exchange", SHARED, PEER, DROP_AND_PAD, cg_grouped_gemm="te"),
    case("no-exchange", DROPLESS, ROWS),
    case("transformer-engine-version", {"transformer-engine": "2.18.0"}),
    case("transformer-engine-version", {"transformer-engine": None}),
    case("expandable-segments", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    case(
        "expandable-segments",
        cg_backend="native",
        PYTORCH_ALLOC_CONF="max_split_size_mb:64,expandable_segments: True",
        NCCL_GRAPH_REGISTER="1",
    ),
    case("max-connections", CUDA_DEVICE_MAX_CONNECTIONS="1"),
    case("extension-missing", without=("tools",), cg_record="somewhere"),
)
