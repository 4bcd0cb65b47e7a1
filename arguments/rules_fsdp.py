"""What Megatron-FSDP requires of a run with layerwise graphs, and number formats."""

from megatron_cg.arguments.rule import Configuration, Rule
from megatron_cg.arguments.schema import NATIVE

_RECIPES_OF_PRIMARY_WEIGHTS = ("delayed", "tensorwise")


def _fp8_weights(given: Configuration) -> bool:
    return given.run.fp8 is not None and given.run.fp8_param_gather


def _under_v2(given: Configuration) -> bool:
    return given.run.megatron_fsdp_version == 2


RULES = (
    Rule(
        "implementation",
        lambda c: c.run.cuda_graph_impl == "local",
        "{flag:--cuda-graph-impl local} with {flag:--use-megatron-fsdp}",
        "only graphs made by Transformer Engine take the hooks of FSDP units into capture",
        "{type:--cuda-graph-impl transformer_engine}",
    ),
    Rule(
        "double-buffer",
        lambda c: not c.run.fsdp_double_buffer and not _under_v2(c),
        "{flag:--use-megatron-fsdp} without {flag:--fsdp-double-buffer}",
        "unsharded parameters are then allocated anew in each iteration, so they move, and a "
        "replayed graph reads memory that was freed",
        "{add:--fsdp-double-buffer} ({flag:--use-nccl-ub} and "
        "{flag:--megatron-fsdp-max-pool-double-buffer} imply it)",
    ),
    Rule(
        "persistent-fallback",
        lambda c: not c.run.fsdp_db_use_persist_buf_on_alloc_fail and not _under_v2(c),
        "{flag:--use-megatron-fsdp} without {flag:--fsdp-db-use-persist-buf-on-alloc-fail}",
        "an FSDP unit that does not fit the double buffers then falls back to a buffer that moves, "
        "and a replayed graph reads memory that was freed",
        "{add:--fsdp-db-use-persist-buf-on-alloc-fail}",
    ),
    Rule(
        "v2-persistent-fallback",
        lambda c: c.run.fsdp_db_use_persist_buf_on_alloc_fail and _under_v2(c),
        "{flag:--fsdp-db-use-persist-buf-on-alloc-fail} with {flag:--megatron-fsdp-version 2}",
        "version 2 has no such buffers and refuses the flag, when the model is built already",
        "{drop:--fsdp-db-use-persist-buf-on-alloc-fail --fsdp-double-buffer}",
    ),
    Rule(
        "v2-symmetric-memory",
        lambda c: c.run.nccl_ub and _under_v2(c),
        "{flag:--use-nccl-ub} with {flag:--megatron-fsdp-version 2}",
        "units are then gathered into symmetric memory, which has not been tried with graphs",
        "{drop:--use-nccl-ub}",
    ),
    Rule(
        "gradient-accumulation-fusion",
        lambda c: c.run.gradient_accumulation_fusion,
        "gradient accumulation fusion, which is on by default",
        "a layer then writes its weights' gradients into Megatron-FSDP's buffers and says so from "
        "Python, which a replay does not run; a graph has to hand its gradients over",
        "{add:--no-gradient-accumulation-fusion}",
    ),
    Rule(
        "expert-parallel-overlap",
        lambda c: c.run.overlap_moe_expert_parallel_comm,
        "{flag:--overlap-moe-expert-parallel-comm}",
        "Megatron-FSDP does the 1F1B overlap with expert parallel neither with double buffers nor "
        "with layerwise graphs",
        "{drop:--overlap-moe-expert-parallel-comm}, or {type:--cuda-graph-impl none}",
    ),
    Rule(
        "optimizer-graph",
        lambda c: c.run.optimizer_cuda_graph,
        "{flag:--optimizer-cuda-graph}",
        "Megatron-FSDP begins to gather the first weights at the end of the optimizer's step. "
        "Inside of a graph no forward pass could wait for that. A graph of the step saves nothing "
        "beside the fast path",
        "{drop:--optimizer-cuda-graph}",
    ),
    Rule(
        "pipeline-parallel",
        lambda c: c.run.pipeline_model_parallel_size > 1,
        "{flag:--pipeline-model-parallel-size {run.pipeline_model_parallel_size}}",
        "in megatron-core 0.19.2 pipeline stages under Megatron-FSDP fail with an einops error "
        "before any graph is captured",
        "{type:--pipeline-model-parallel-size 1}, and shard over data or expert parallel ranks",
    ),
    Rule(
        "fp16",
        lambda c: c.run.fp16,
        "{flag:--fp16} with {flag:--use-megatron-fsdp}",
        "before it unscales, Megatron's optimizer (megatron-core 0.19.2) reads the gradient of "
        "every parameter, and under Megatron-FSDP some have none, so eager runs fail too",
        "{type:--bf16} instead, or {drop:--fp16} and train in fp32",
    ),
    Rule(
        "fp8-primary-weights",
        lambda c: _fp8_weights(c) and not c.run.keep_fp8_transpose_cache,
        "{flag:--fp8-param-gather} without {flag:--keep-fp8-transpose-cache}",
        "Megatron-FSDP then throws the weights' transposes away after each use and makes new ones "
        "elsewhere, and a replayed backward reads the old places: the gradient norm is NaN",
        "{add:--keep-fp8-transpose-cache}, or {drop:--fp8-param-gather} and keep "
        "{flag:--fp8-format}",
    ),
    Rule(
        "fp8-primary-weights-recipe",
        lambda c: _fp8_weights(c) and c.run.fp8_recipe not in _RECIPES_OF_PRIMARY_WEIGHTS,
        "{flag:--fp8-param-gather} with {flag:--fp8-recipe {run.fp8_recipe}}",
        "not solved yet: with blockwise weights Megatron-FSDP asks for more buffers than "
        "{flag:--fsdp-double-buffer} has ('No buffer found for bucket_id'), and other recipes were "
        "never seen to work",
        "{type:--fp8-recipe delayed} or {flag:--fp8-recipe tensorwise}, or "
        "{drop:--fp8-param-gather}",
    ),
    Rule(
        "native-backend-fp8",
        lambda c: c.environment.backend == NATIVE and c.run.has_low_precision,
        "FP8 or FP4 with {flag:--cg-backend native}",
        "graphs of the native backend do not update the scales of quantized tensors",
        "{drop:--fp8-format --fp4-format}, or {type:--cg-backend te}",
    ),
)
