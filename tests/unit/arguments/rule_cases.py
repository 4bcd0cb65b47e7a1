"""One change to a run that keeps every rule, for each way to break one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """What breaks ``rule``, alone, and the words its violation must say."""

    rule: str
    change: dict[str, Any] = field(default_factory=dict)
    found: str = ""
    reason: str = ""
    remedy: str = ""
    layers: tuple[str, ...] = ()
    graph: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = {**self.change, **self.variables, **self.versions}
        flags = (str(value) for value in self.graph.values())
        return f"{self.rule}:{','.join([*changed, *self.layers, *flags])}"


_SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
_DROP_AND_PAD: dict[str, Any] = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}


def _modules(*names: str, **others: Any) -> dict[str, Any]:
    return {"cuda_graph_modules": names, **others}


FSDP = (
    Case(
        "implementation",
        {"cuda_graph_impl": "local"},
        "impl local",
        "Transformer Engine",
        "--cuda-graph-impl transformer_engine",
    ),
    Case(
        "double-buffer",
        {"fsdp_double_buffer": False},
        "without --fsdp-double-buffer",
        "memory that was freed",
        "add --fsdp-double-buffer",
    ),
    Case(
        "persistent-fallback",
        {"fsdp_db_use_persist_buf_on_alloc_fail": False},
        "without --fsdp-db-use-persist-buf-on-alloc-fail",
        "a buffer that moves",
        "add --fsdp-db-use-persist-buf-on-alloc-fail",
    ),
    Case(
        "gradient-accumulation-fusion",
        {"gradient_accumulation_fusion": True},
        "on, as it is by default",
        "grad_added_to_main_grad",
        "--no-gradient-accumulation-fusion",
    ),
    Case(
        "expert-parallel-overlap",
        {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm",
        "neither with double buffers",
        "drop --overlap-moe-expert-parallel-comm",
    ),
    Case(
        "delayed-weight-gradients",
        {"delay_wgrad_compute": True},
        "--delay-wgrad-compute",
        "after the layer's backward",
        "drop --delay-wgrad-compute",
    ),
    Case(
        "pipeline-parallel",
        {"pipeline_model_parallel_size": 2},
        "--pipeline-model-parallel-size 2",
        "einops",
        "--pipeline-model-parallel-size 1",
    ),
)

FAST_PATH = (
    Case(
        "fast-path-parts",
        {},
        "--cg-fast-path: 'main-gradient' (did you mean main-gradients?)",
        "no part of that name",
        "choose from last-unit, swap, gradients, ",
        graph={"cg_fast_path": "unshard,main-gradient"},
    ),
    Case(
        "fast-path-parts",
        {},
        "--cg-fast-path: 'gradients' without 'unshard'",
        "gradients works only together with unshard",
        "add unshard, or leave gradients out",
        graph={"cg_fast_path": "gradients"},
    ),
    Case(
        "fast-path-parts",
        {},
        "--cg-fast-path swap with --cg-no-fsdp-fast-path",
        "turns all of them off",
        "drop one of the two flags",
        graph={"cg_fast_path": "swap", "cg_no_fsdp_fast_path": True},
    ),
)

SCOPES = (
    Case(
        "moe-and-router",
        _modules("moe", "moe_router", **_DROP_AND_PAD),
        "both moe and moe_router",
        "captured twice",
        "--cuda-graph-modules attn moe_router",
    ),
    Case(
        "preprocess-without-router",
        _modules("attn", "moe_preprocess"),
        "moe_preprocess without moe_router",
        "continuation of the router's graph",
        "--cuda-graph-modules attn moe_router moe_preprocess",
    ),
    Case(
        "moe-without-experts",
        {"num_experts": None},
        "moe_router in a model without experts",
        "parts of a MoE layer",
        "--num-experts 8",
    ),
    Case(
        "moe-without-drop-and-pad",
        _modules("attn", "moe"),
        "moe without drop-and-pad",
        "reads it on the CPU",
        "--cg-grouped-gemm torch",
    ),
    Case(
        "moe-without-drop-and-pad",
        _modules("attn", "moe"),
        "moe without drop-and-pad",
        "differs from step to step",
        "--moe-pad-expert-input-to-capacity",
    ),
    Case(
        "moe-without-drop-and-pad",
        _modules("attn", "moe", moe_expert_capacity_factor=1.0),
        "moe without drop-and-pad",
        "differs from step to step",
        "--moe-expert-capacity-factor 1.0",
    ),
    Case(
        "preprocess-synchronizes",
        _modules("moe_router", "moe_preprocess", moe_expert_capacity_factor=1.0),
        "dispatcher-type alltoall",
        "waits for them",
        "drop moe_preprocess",
    ),
    Case(
        "preprocess-synchronizes",
        _modules("moe_router", "moe_preprocess", moe_router_padding_for_fp8=True),
        "router padding for FP8",
        "waits for them",
        "drop moe_preprocess",
    ),
    Case(
        "scope-selects-nothing",
        _modules("attn", "mlp"),
        "--cuda-graph-modules mlp",
        "none of the model's 4 layers has a dense MLP",
        "drop mlp",
    ),
    Case(
        "scope-selects-nothing",
        _modules("attn", "mlp", moe_layer_freq=(1, 1, 1, 1)),
        "--cuda-graph-modules mlp",
        "none of the model's 4 layers",
        "drop mlp",
    ),
)

SCOPES_BEYOND_MEGATRON = (
    Case(
        "preprocess-synchronizes",
        _modules("moe_router", "moe_preprocess", moe_router_padding_for_quantization=True),
        "router padding for FP8 or FP4",
        "waits for them",
        "drop moe_preprocess",
    ),
    Case(
        "scope-selects-nothing",
        _modules("attn", "mamba"),
        "--cuda-graph-modules mamba",
        "has a Mamba mixer",
        "drop mamba from --cuda-graph-modules",
    ),
    Case(
        "scope-selects-nothing",
        _modules("attn", "moe_router", hybrid_layer_pattern="E|E/**"),
        "--cuda-graph-modules attn",
        "none of the model's 2 layers has attention",
        "drop attn",
    ),
    Case(
        "scope-selects-nothing",
        {"moe_layer_freq": (0, 0, 1, 1)},
        "leaves moe_router on no layer",
        "first layer with it is layer 2",
        "--cg-layers moe_router:2-",
        layers=("moe_router:0-1",),
    ),
    Case(
        "whole-moe-layer",
        _modules(),
        "4 of them MoE layers",
        "read back to the CPU",
        "--cuda-graph-modules attn moe_router",
    ),
    Case(
        "whole-moe-layer",
        _modules(moe_layer_freq=(0, 1, 1, 1)),
        "the first is layer 2",
        "read back to the CPU",
        "--cg-layers layer:0",
        layers=("layer:0,2-",),
    ),
    Case("cg-layers", {}, "--cg-layers attn", "no colon", "attn:0-23", layers=("attn",)),
    Case(
        "cg-layers",
        {},
        "--cg-layers moe_router:2-9",
        "last index is 3",
        "--cg-layers moe_router:2-",
        layers=("moe_router:2-9",),
    ),
)

LAYERS = (
    Case(
        "sinkhorn-router",
        {"moe_router_load_balancing_type": ("sinkhorn",)},
        "load-balancing-type sinkhorn",
        "the CPU waits for that value",
        "--moe-router-load-balancing-type aux_loss",
    ),
    Case(
        "routing-replay",
        {"moe_enable_routing_replay": True},
        "--moe-enable-routing-replay",
        "Python code, which a replay does not run",
        "drop --moe-enable-routing-replay",
    ),
    Case(
        "dispatcher-reads-counts",
        _modules("attn", "moe", moe_token_dispatcher_type="allgather", **_DROP_AND_PAD),
        "dispatcher-type allgather in",
        "with drop-and-pad too",
        "--moe-token-dispatcher-type alltoall",
    ),
    Case(
        "dispatcher-reads-counts",
        _modules(moe_token_dispatcher_type="allgather", **_DROP_AND_PAD),
        "dispatcher-type allgather in",
        "with drop-and-pad too",
        "--cuda-graph-modules attn moe_router",
    ),
    Case(
        "dispatcher-reads-counts",
        _modules(
            "moe",
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="ncclep",
            **_DROP_AND_PAD,
        ),
        "--moe-flex-dispatcher-backend ncclep",
        "with drop-and-pad too",
        "--moe-token-dispatcher-type alltoall",
    ),
    Case(
        "hybridep-uneven-inputs",
        _modules(
            "moe_router",
            "moe_preprocess",
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="hybridep",
            moe_hybridep_pad_uneven_dispatch_inputs=True,
        ),
        "--moe-hybridep-pad-uneven-dispatch-inputs",
        "read on the CPU before each dispatch",
        "drop --moe-hybridep-pad-uneven-dispatch-inputs",
    ),
    Case(
        "largest-attention-logits",
        {"qk_clip": True},
        "--qk-clip",
        "nothing would be clipped or logged",
        "drop --qk-clip",
    ),
    Case(
        "largest-attention-logits",
        {"log_max_attention_logit": True},
        "--log-max-attention-logit",
        "nothing would be clipped or logged",
        "scopes other than attn",
    ),
)

_GROUPED: dict[str, Any] = {"moe_grouped_gemm": True, "add_bias_linear": False}
_DROPLESS: dict[str, Any] = {**_GROUPED, "cuda_graph_modules": ("attn", "moe")}


def _torch(rule: str, base: dict[str, Any], change: dict[str, Any], *words: str) -> Case:
    """A run with ``--cg-grouped-gemm torch`` that breaks ``rule``."""
    found, reason, remedy = words
    return Case(rule, {**base, **change}, found, reason, remedy, graph={"cg_grouped_gemm": "torch"})


EXPERTS = (
    _torch(
        "grouped-gemm-without-experts",
        _GROUPED,
        {"moe_grouped_gemm": False},
        *("without grouped experts", "this model has none", "--moe-grouped-gemm"),
    ),
    _torch(
        "grouped-gemm-without-experts",
        _GROUPED,
        {"num_experts": None, "cuda_graph_modules": ("attn",)},
        *("without grouped experts", "this model has none", "in a MoE model"),
    ),
    _torch(
        "grouped-gemm-dtype", _GROUPED, {"bf16": False}, "without --bf16", "alone", "add --bf16"
    ),
    _torch(
        "grouped-gemm-low-precision",
        _GROUPED,
        {"fp8": "hybrid"},
        *("with FP8 or FP4", "in bfloat16", "drop --fp8-format"),
    ),
    _torch(
        "grouped-gemm-low-precision",
        _GROUPED,
        {"fp4": "e2m1"},
        *("with FP8 or FP4", "in bfloat16", "--fp4-format"),
    ),
    _torch(
        "grouped-gemm-bias",
        _GROUPED,
        {"add_bias_linear": True},
        *("have biases", "adds no bias", "--disable-bias-linear"),
    ),
    _torch(
        "grouped-gemm-op-fuser",
        _GROUPED,
        {"use_transformer_engine_op_fuser": True},
        *("op-fuser", "do not call", "drop --use-transformer-engine-op-fuser"),
    ),
    _torch(
        "experts-dispatcher",
        _DROPLESS,
        {"moe_token_dispatcher_type": "flex"},
        *("dispatcher-type flex", "dispatcher alltoall", "--moe-token-dispatcher-type alltoall"),
    ),
    _torch(
        "experts-tensor-parallel",
        _DROPLESS,
        {"expert_tensor_parallel_size": 2},
        *("several tensor-parallel ranks", "reads on the CPU", "--expert-tensor-parallel-size 1"),
    ),
    _torch(
        "experts-tensor-parallel",
        _DROPLESS,
        {"expert_tensor_parallel_size": 2, "cuda_graph_modules": ()},
        *("several tensor-parallel ranks", "reads on the CPU", "attn moe_router"),
    ),
    *(
        _torch(
            "experts-uneven",
            _DROPLESS,
            {option: value},
            *("router padding", "from step to step", "--moe-pad-expert-input-to-capacity"),
        )
        for option, value in (
            ("moe_expert_capacity_factor", 1.0),
            ("moe_router_padding_for_fp8", True),
            ("moe_router_padding_for_quantization", True),
        )
    ),
)
"""``--cg-grouped-gemm torch``."""

_BOUNDED: dict[str, Any] = {**_DROPLESS, "expert_model_parallel_size": 2}


def _rows(
    rule: str, change: dict[str, Any], *words: str, factor: float = 1.25, gemm: str = "torch"
) -> Case:
    """A run with ``--cg-moe-rows`` that breaks ``rule``."""
    graph = {"cg_moe_rows": factor, "cg_grouped_gemm": gemm}
    found, reason, remedy = words
    return Case(rule, {**_BOUNDED, **change}, found, reason, remedy, graph=graph)


ROWS = (
    _rows(
        "rows-below-average",
        {},
        *("--cg-moe-rows 0.9", "every step would be repeated", "--cg-moe-rows 1.25"),
        factor=0.9,
    ),
    _rows(
        "rows-below-average",
        {},
        *("--cg-moe-rows nan", "on average", "--cg-moe-rows 1.25"),
        factor=float("nan"),
    ),
    _rows(
        "rows-without-experts",
        _modules("attn", "moe_router"),
        *("1.25 in a run whose graphs hold", "such graphs have room", "attn moe"),
    ),
    _rows(
        "rows-without-experts",
        _modules("attn", "moe_router"),
        *("hold no dropless experts", "bounds the rows", "--cg-grouped-gemm torch"),
        gemm="te",
    ),
    _rows(
        "rows-without-experts",
        _DROP_AND_PAD,
        *("hold no dropless experts", "bounds the rows", "without drop and pad"),
    ),
    _rows(
        "rows-without-expert-parallel",
        {"expert_model_parallel_size": 1},
        *("--expert-model-parallel-size 1", "exactly these", "drop --cg-moe-rows"),
    ),
    _rows(
        "rows-logged-passes",
        {"logs_passes": True},
        *("--save-activations-interval", "saved twice", "drop these options"),
    ),
)
"""``--cg-moe-rows``."""

RECOMPUTE = (
    Case(
        "full-recompute",
        {"recompute_granularity": "full"},
        "granularity full",
        "whole layers",
        "--recompute-granularity selective",
    ),
    Case(
        "moe-recompute-around-router",
        {**_SELECTIVE, "recompute_modules": ("moe",)},
        "--recompute-modules moe with",
        "wholly inside or wholly outside",
        "--recompute-modules moe_act",
    ),
    Case(
        "dropout-in-recomputed-attention",
        {**_SELECTIVE},
        "--attention-dropout 0.1",
        "same random numbers",
        "--attention-dropout 0",
    ),
    Case(
        "dropout-in-recomputed-mlp",
        {**_SELECTIVE, **_modules("mlp"), "recompute_modules": ("mlp",), "num_experts": None},
        "--hidden-dropout 0.1",
        "same random numbers",
        "--hidden-dropout 0",
    ),
    Case(
        "dropout-in-recomputed-mlp",
        {**_SELECTIVE, **_modules("moe"), **_DROP_AND_PAD, "recompute_modules": ("moe",)},
        "--hidden-dropout 0.1",
        "same random numbers",
        "leave mlp and moe out",
    ),
    Case(
        "jitter-in-recomputed-moe",
        {
            **_SELECTIVE,
            **_modules("moe"),
            **_DROP_AND_PAD,
            "recompute_modules": ("moe",),
            "hidden_dropout": 0.0,
            "moe_input_jitter_eps": 0.01,
        },
        "--moe-input-jitter-eps 0.01",
        "same random numbers",
        "drop --moe-input-jitter-eps",
    ),
    Case(
        "cpu-offloading",
        {"cpu_offloading": True},
        "--cpu-offloading-num-layers",
        "Python code that a replay does not run",
        "drop --cpu-offloading-num-layers",
    ),
)

NUMERICS = (
    Case(
        "activation-offloading",
        {"fine_grained_activation_offloading": True},
        "--fine-grained-activation-offloading",
        "streams outside of the graph",
        "drop --fine-grained-activation-offloading",
    ),
    Case(
        "fp16",
        {"bf16": False, "fp16": True},
        "--fp16 with --use-megatron-fsdp",
        "'NoneType' object has no attribute 'data'",
        "type --bf16",
    ),
    Case(
        "fp8-without-bf16",
        {"bf16": False, "fp8": "hybrid"},
        "--fp8-format hybrid without --bf16",
        "another type than bfloat16",
        "add --bf16",
    ),
    Case(
        "fp8-primary-weights",
        {"fp8": "hybrid", "fp8_param_gather": True},
        "--fp8-param-gather without --keep-fp8-transpose-cache",
        "the gradient norm is NaN",
        "add --keep-fp8-transpose-cache",
    ),
    Case(
        "fp8-primary-weights-recipe",
        {
            "fp8": "e4m3",
            "fp8_recipe": "blockwise",
            "fp8_param_gather": True,
            "keep_fp8_transpose_cache": True,
        },
        "--fp8-param-gather with --fp8-recipe blockwise",
        "No buffer found for bucket_id",
        "--fp8-recipe tensorwise",
    ),
    Case(
        "shared-expert-overlap",
        {"moe_shared_expert_overlap": True},
        "with a captured MoE router",
        "not idle in the warmup",
        "drop --moe-shared-expert-overlap",
    ),
    Case(
        "optimizer-graph",
        {"optimizer_cuda_graph": True},
        "--optimizer-cuda-graph",
        "invalid argument",
        "drop --optimizer-cuda-graph",
    ),
    Case(
        "repeated-prediction-layer",
        {"mtp_use_repeated_layer": True, "mtp_num_layers": 2},
        "--mtp-use-repeated-layer",
        "activations of the last run only",
        "--mtp-num-layers 1",
    ),
    Case(
        "packed-sequences",
        {"sft": True},
        "--sft",
        "differ from step to step",
        "--cuda-graph-impl none",
    ),
    Case(
        "packed-sequences",
        {"rl_use_sequence_packing": True},
        "--rl-use-sequence-packing",
        "differ from step to step",
        "--cuda-graph-impl none",
    ),
    Case(
        "hybrid-context-parallel",
        {"hybrid_context_parallel": True},
        "--hybrid-context-parallel",
        "several lengths",
        "drop --hybrid-context-parallel",
    ),
    Case(
        "inference-rng-tracker",
        {"inference_rng_tracker": True},
        "--inference-rng-tracker",
        "no random states",
        "add --te-rng-tracker",
    ),
)

ENVIRONMENT = (
    Case(
        "transformer-engine-version",
        {},
        "transformer-engine 2.18.0",
        "capture_time_hooks",
        "'transformer-engine[pytorch]>=2.19'",
        versions={"transformer-engine": "2.18.0"},
    ),
    Case(
        "transformer-engine-version",
        {},
        "not installed",
        "2.19 or newer",
        "'transformer-engine[pytorch]>=2.19'",
        versions={"transformer-engine": None},
    ),
    Case(
        "megatron-core-version",
        {},
        "megatron-core 0.18.2",
        "parameters move",
        "'megatron-core>=0.19'",
        versions={"megatron-core": "0.18.2"},
    ),
    Case(
        "expandable-segments",
        {},
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "illegal memory access",
        "export NCCL_GRAPH_REGISTER=0",
        variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Case(
        "expandable-segments",
        {},
        "PYTORCH_ALLOC_CONF=",
        "illegal memory access",
        "out of PYTORCH_ALLOC_CONF",
        variables={
            "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments: True",
            "NCCL_GRAPH_REGISTER": "1",
        },
    ),
    Case(
        "max-connections",
        {},
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "one hardware queue",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
        variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
)

MEGATRON_AGREES = (*SCOPES, *RECOMPUTE)
"""The cases that ``TransformerConfig`` of megatron-core must refuse too."""

ALL = (
    *FSDP,
    *FAST_PATH,
    *SCOPES,
    *SCOPES_BEYOND_MEGATRON,
    *LAYERS,
    *EXPERTS,
    *ROWS,
    *RECOMPUTE,
    *NUMERICS,
    *ENVIRONMENT,
)
