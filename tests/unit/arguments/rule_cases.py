"""One change to a run that keeps every rule, for each way to break one."""

from __future__ import annotations

from typing import Any

from tests.unit.arguments.rule_case import DROP_AND_PAD, Case, modules
from tests.unit.arguments.rule_cases_environment import BACKEND, ENVIRONMENT, PRECOMPILE
from tests.unit.arguments.rule_cases_numerics import NUMERICS, RECOMPUTE
from tests.unit.arguments.rule_cases_scopes import SCOPES, SCOPES_BEYOND_MEGATRON

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
    *(
        Case(
            "gradient-accumulation-fusion",
            {"gradient_accumulation_fusion": True, **change},
            f"on by default, with {flag}",
            why,
            "--no-gradient-accumulation-fusion",
        )
        for change, flag, why in (
            (
                {"data_parallel_sharding_strategy": "optim"},
                "--data-parallel-sharding-strategy optim",
                "each microbatch overwrites",
            ),
            (
                {"mtp_use_repeated_layer": True, "mtp_num_layers": 2},
                "--mtp-use-repeated-layer and --mtp-num-layers 2",
                "each use of such a weight overwrites",
            ),
            ({"gradient_ranks": 1}, "gradients that only one rank has", "overwrites those"),
            (
                {"megatron_fsdp_main_grads_dtype": "fp32"},
                "--megatron-fsdp-main-grads-dtype fp32",
                "a graph hands over gradients in bf16",
            ),
            (
                {"megatron_fsdp_grad_comm_dtype": "fp32"},
                "--megatron-fsdp-grad-comm-dtype fp32",
                "their bits would differ",
            ),
            ({"transformer_impl": "local"}, "--transformer-impl local", "by another GEMM"),
            (
                {"use_transformer_engine_op_fuser": True},
                "--use-transformer-engine-op-fuser",
                "grad_added_to_main_grad",
            ),
        )
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
        "optimizer-graph",
        {"optimizer_cuda_graph": True},
        "--optimizer-cuda-graph",
        "no forward pass could wait",
        "drop --optimizer-cuda-graph",
    ),
    Case(
        "pipeline-parallel",
        {"pipeline_model_parallel_size": 2},
        "--pipeline-model-parallel-size 2",
        "einops",
        "--pipeline-model-parallel-size 1",
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
        "dispatcher-reads-counts",
        modules("attn", "moe", moe_token_dispatcher_type="allgather", **DROP_AND_PAD),
        "dispatcher-type allgather in",
        "with drop-and-pad too",
        "--moe-token-dispatcher-type alltoall",
    ),
    Case(
        "dispatcher-reads-counts",
        modules(moe_token_dispatcher_type="allgather", **DROP_AND_PAD),
        "dispatcher-type allgather in",
        "with drop-and-pad too",
        "--cuda-graph-modules attn moe_router",
    ),
    Case(
        "dispatcher-reads-counts",
        modules(
            "moe",
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend="ncclep",
            **DROP_AND_PAD,
        ),
        "--moe-flex-dispatcher-backend ncclep",
        "with drop-and-pad too",
        "--moe-token-dispatcher-type alltoall",
    ),
    Case(
        "hybridep-uneven-inputs",
        modules(
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
        "routing-trace",
        {"moe_routing_trace_path": "traces"},
        "--moe-routing-trace-path",
        "nothing would be written",
        "drop --moe-routing-trace-path",
    ),
    Case(
        "routing-trace",
        modules(moe_routing_trace_path="traces", **DROP_AND_PAD),
        "--moe-routing-trace-path",
        "a replay runs no hook",
        "--cuda-graph-modules attn",
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
        "grouped-gemm-dtype",
        _GROUPED,
        {"bf16": False},
        "without --bf16",
        "only in bfloat16",
        "add --bf16",
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
    _torch(
        "experts-router",
        _DROPLESS,
        {"moe_router_load_balancing_type": ("aux_loss", "quantile_balancing")},
        *("quantile_balancing", "aux_loss, seq_aux_loss", "attn moe_router"),
    ),
    _torch(
        "grouped-gemm-delayed-gradients",
        _GROUPED,
        {"delay_wgrad_compute": True},
        *("--delay-wgrad-compute", "at once", "drop --delay-wgrad-compute"),
    ),
    _torch(
        "experts-delayed-gradients",
        _GROUPED,
        {"overlap_dispatch_backward_with_experts_wgrad": True},
        *("--cg-grouped-gemm torch", "at once", "drop --overlap-dispatch"),
    ),
    Case(
        "experts-delayed-gradients",
        {
            "cuda_graph_modules": ("attn", "moe"),
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
            "overlap_dispatch_backward_with_experts_wgrad": True,
        },
        *("experts in a graph", "does not run in a replay", "drop --overlap-dispatch"),
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
        {"cuda_graph_modules": ("attn", "moe_router")},
        *("1.25 in a run whose graphs hold", "such graphs have room", "attn moe"),
    ),
    _rows(
        "rows-without-experts",
        {"cuda_graph_modules": ("attn", "moe_router")},
        *("hold no dropless experts", "bounds the rows", "--cg-grouped-gemm torch"),
        gemm="te",
    ),
    _rows(
        "rows-without-experts",
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        *("hold no dropless experts", "bounds the rows", "without drop and pad"),
    ),
    _rows(
        "rows-without-expert-parallel",
        {"expert_model_parallel_size": 1},
        *("--expert-model-parallel-size 1", "exactly these", "drop --cg-moe-rows"),
    ),
)
"""``--cg-moe-rows``."""


def _peers(rule: str, change: dict[str, Any], *words: str, gemm: str = "torch") -> Case:
    """A run with ``--cg-moe-exchange peer`` that breaks ``rule``."""
    graph = {"cg_moe_exchange": "peer", "cg_grouped_gemm": gemm}
    found, reason, remedy = words
    return Case(rule, {**_BOUNDED, **change}, found, reason, remedy, graph=graph)


PEERS = (
    _peers(
        "exchange-without-experts",
        {"cuda_graph_modules": ("attn", "moe_router")},
        *("peer in a run whose graphs hold", "exchange tokens", "attn moe"),
    ),
    _peers(
        "exchange-without-experts",
        {},
        *("hold no dropless experts", "as Megatron does", "--cg-grouped-gemm torch"),
        gemm="te",
    ),
    _peers(
        "exchange-without-experts",
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        *("hold no dropless experts", "as Megatron does", "without drop and pad"),
    ),
    _peers(
        "exchange-without-expert-parallel",
        {"expert_model_parallel_size": 1},
        *("--expert-model-parallel-size 1", "exchanges no tokens", "drop --cg-moe-exchange"),
    ),
)
"""``--cg-moe-exchange peer``."""


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
    *PRECOMPILE,
    *ENVIRONMENT,
)
