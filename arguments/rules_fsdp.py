"""What Megatron-FSDP itself requires of a run with layerwise graphs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cg.arguments.rule import Refusal, Rule
from megatron_cg.arguments.schema import (
    Environment,
    GraphArguments,
    RunArguments,
    prediction_is_repeated,
)
from megatron_cg.errors import Violation

_ON = "gradient accumulation fusion, which is on by default,"


def fusion(
    run: RunArguments, graph: GraphArguments, environment: Environment
) -> Iterator[Violation]:
    """Gradient-accumulation fusion is refused where bits would differ, or eager runs are wrong."""
    if not run.gradient_accumulation_fusion:
        return
    for found, reason in _against_fusion(run):
        yield Violation(
            "gradient-accumulation-fusion", found, reason, "add --no-gradient-accumulation-fusion"
        )


def _against_fusion(run: RunArguments) -> Iterator[tuple[str, str]]:
    """What was found, and why."""
    if run.data_parallel_sharding_strategy in ("no_shard", "optim"):
        yield (
            f"{_ON} with --data-parallel-sharding-strategy {run.data_parallel_sharding_strategy}",
            "Megatron-FSDP sets overwrite_main_grad on weights without sharded gradients too "
            "(megatron-core 0.19.2), so each microbatch overwrites the gradients of the one before "
            "it, without graphs as well",
        )
    elif run.gradient_ranks is not None and run.gradient_ranks < 2:
        yield (
            f"{_ON} with gradients that only one rank has (one GPU, or as many expert-parallel "
            "ranks as GPUs)",
            "Megatron-FSDP then keeps them whole, and each microbatch overwrites those of the one "
            "before it (megatron-core 0.19.2), without graphs as well",
        )
    own = "bf16" if run.bf16 else "fp32"
    flag, written = "--megatron-fsdp-grad-comm-dtype", run.megatron_fsdp_grad_comm_dtype
    if written == "auto":
        flag, written = "--megatron-fsdp-main-grads-dtype", run.megatron_fsdp_main_grads_dtype
    if written not in ("auto", own):
        yield (
            f"{_ON} with {flag} {written}",
            f"the GEMM would write gradients in {written}; a graph hands over gradients in {own}, "
            "so their bits would differ",
        )
    if prediction_is_repeated(run):
        yield (
            f"{_ON} with --mtp-use-repeated-layer and --mtp-num-layers {run.mtp_num_layers}",
            "each use of such a weight overwrites the gradient of the one before it, without "
            "graphs as well",
        )
    if run.transformer_impl != "transformer_engine":
        yield (
            f"{_ON} with --transformer-impl {run.transformer_impl}",
            "Megatron's own layers then compute gradients by another GEMM than without the fusion, "
            "and a graph holds the one without, so their bits would differ",
        )
    if run.use_transformer_engine_op_fuser:
        yield (
            f"{_ON} with --use-transformer-engine-op-fuser",
            "fused operations tell Megatron-FSDP in Python, by grad_added_to_main_grad, that a "
            "gradient is in its buffer already; a replay runs no Python, so the placeholder that "
            "it returns is taken for the gradient",
        )


RULES: tuple[Rule, ...] = (
    Refusal(
        "implementation",
        lambda run: run.cuda_graph_impl == "local",
        "--cuda-graph-impl local with --use-megatron-fsdp",
        "only graphs made by Transformer Engine take the hooks of FSDP units into capture",
        "type --cuda-graph-impl transformer_engine",
    ),
    Refusal(
        "double-buffer",
        lambda run: not run.fsdp_double_buffer,
        "--use-megatron-fsdp without --fsdp-double-buffer",
        "unsharded parameters are then allocated anew in each iteration, so they move, and a "
        "replayed graph reads memory that was freed",
        "add --fsdp-double-buffer (--use-nccl-ub and --megatron-fsdp-max-pool-double-buffer imply "
        "it)",
    ),
    Refusal(
        "persistent-fallback",
        lambda run: not run.fsdp_db_use_persist_buf_on_alloc_fail,
        "--use-megatron-fsdp without --fsdp-db-use-persist-buf-on-alloc-fail",
        "an FSDP unit that does not fit the double buffers then falls back to a buffer that moves, "
        "and a replayed graph reads memory that was freed",
        "add --fsdp-db-use-persist-buf-on-alloc-fail",
    ),
    fusion,
    Refusal(
        "expert-parallel-overlap",
        lambda run: run.overlap_moe_expert_parallel_comm,
        "--overlap-moe-expert-parallel-comm",
        "Megatron-FSDP does the 1F1B overlap with expert parallel neither with double buffers nor "
        "with layerwise graphs",
        "drop --overlap-moe-expert-parallel-comm, or type --cuda-graph-impl none",
    ),
    Refusal(
        "delayed-weight-gradients",
        lambda run: run.delay_wgrad_compute,
        "--delay-wgrad-compute",
        "weight gradients then come after the layer's backward, when Megatron-FSDP has reduced "
        "them; and Megatron allows it only with --overlap-moe-expert-parallel-comm, which "
        "Megatron-FSDP cannot do with layerwise graphs",
        "drop --delay-wgrad-compute",
    ),
    Refusal(
        "optimizer-graph",
        lambda run: run.optimizer_cuda_graph,
        "--optimizer-cuda-graph",
        "Megatron-FSDP begins to gather the first weights at the end of the optimizer's step. "
        "Inside of a graph no forward pass could wait for that. A graph of the step saves nothing "
        "beside the fast path",
        "drop --optimizer-cuda-graph",
    ),
    Refusal(
        "pipeline-parallel",
        lambda run: run.pipeline_model_parallel_size > 1,
        "--pipeline-model-parallel-size {run.pipeline_model_parallel_size}",
        "in megatron-core 0.19.2 pipeline stages under Megatron-FSDP fail with an einops error "
        "before any graph is captured",
        "type --pipeline-model-parallel-size 1, and shard over data or expert parallel ranks",
    ),
)
