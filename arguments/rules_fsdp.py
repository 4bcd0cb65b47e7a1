"""What Megatron-FSDP itself requires of a run with layerwise graphs."""

from __future__ import annotations

from megatron_cg.arguments.rule import Refusal, Rule

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
    Refusal(
        "gradient-accumulation-fusion",
        lambda run: run.gradient_accumulation_fusion,
        "gradient accumulation fusion is on, as it is by default",
        "Transformer Engine then tells Megatron-FSDP in Python, by grad_added_to_main_grad, that "
        "a weight's gradient is already in its buffer; a replay runs no Python, so the placeholder "
        "that it returns is taken for the gradient",
        "add --no-gradient-accumulation-fusion",
    ),
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
        "pipeline-parallel",
        lambda run: run.pipeline_model_parallel_size > 1,
        "--pipeline-model-parallel-size {run.pipeline_model_parallel_size}",
        "in megatron-core 0.19.2 pipeline stages under Megatron-FSDP fail with an einops error "
        "before any graph is captured",
        "type --pipeline-model-parallel-size 1, and shard over data or expert parallel ranks",
    ),
)
