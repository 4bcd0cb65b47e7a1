"""Features that the released packages themselves cannot have beside layerwise graphs."""

from __future__ import annotations

from tools.refusals.row import CORE, FSDP, Line, Row, Status

_CONFIG = "megatron/core/transformer/transformer_config.py"
_ARGUMENTS = "megatron/training/arguments.py"
_ADAPTER = "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py"
_GRAPHS = "megatron/core/transformer/cuda_graphs.py"
_YAML = "megatron/training/yaml_arguments.py"
_FSDP_BUFFERS = "megatron_fsdp/param_and_grad_buffer.py"
_AGREES = "unit/arguments/test_megatron_agrees.py"
_REFUSES = f"{_AGREES}::test_megatron_refuses_what_we_refuse_and_only_because_of_graphs"
_SHOWN = "unit/arguments/test_refusals_reproduced.py"
_ENDS = f"{_SHOWN}::test_megatron_ends_before_it_builds_a_model"


def _config(text: str) -> Line:
    return Line(CORE, _CONFIG, text)


ROWS = (
    Row(
        "`--fp16`",
        Status.UPSTREAM,
        "the optimizer reads the gradient of every parameter before it unscales, and under "
        "Megatron-FSDP a rank that has no part of a parameter has none: an eager run fails too",
        rules=("fp16",),
        tests=(f"{_SHOWN}::test_fp16_fails_in_the_first_step_without_graphs",),
        lines=(
            Line(
                CORE,
                "megatron/core/optimizer/distrib_optimizer.py",
                "param.grad.data",
            ),
        ),
    ),
    Row(
        "`--qk-clip`, `--log-max-attention-logit` with captured attention",
        Status.UPSTREAM,
        "under Megatron-FSDP, `clip_qk` does not find the layers of a BF16 model, without graphs "
        "too: it looks below two wrappers, and there are three. In fp32, the largest logits reach "
        "the log by an attribute that Python code of the attention sets, and a replay runs none",
        rules=("largest-attention-logits",),
        tests=(
            f"{_SHOWN}::test_largest_logits_of_a_bf16_model_are_not_found_under_megatron_fsdp",
            f"{_SHOWN}::test_a_replay_leaves_no_largest_logits",
        ),
        lines=(
            Line(
                CORE,
                "megatron/core/extensions/transformer_engine.py",
                "self.current_max_attn_logits = batch_max_attention_logits",
            ),
            Line(
                CORE,
                "megatron/core/optimizer/qk_clip.py",
                "in model_chunk.module.module.decoder.layers:",
            ),
        ),
    ),
    Row(
        "`--pipeline-model-parallel-size` above 1",
        Status.UPSTREAM,
        "Megatron-FSDP divides all ranks among data, expert and tensor parallelism alone, so "
        "wrapping a model of a pipeline stage fails (NVIDIA/Megatron-LM#2302 is pending)",
        rules=("pipeline-parallel",),
        tests=(f"{_SHOWN}::test_a_pipeline_stage_cannot_be_wrapped",),
        lines=(Line(CORE, _ADAPTER, '"(dp_cp ep tp) -> ep dp_cp tp",'),),
    ),
    Row(
        "`--overlap-moe-expert-parallel-comm`, `--delay-wgrad-compute`",
        Status.UPSTREAM,
        "Megatron-FSDP asserts that neither double buffers nor layerwise graphs are used with the "
        "overlap, and delayed weight gradients need the overlap",
        rules=("expert-parallel-overlap", "delayed-weight-gradients"),
        tests=(f"{_SHOWN}::test_overlap_with_expert_parallelism_takes_no_layerwise_graphs",),
        lines=(
            Line(
                CORE, _ADAPTER, '"1F1B overlap with FSDP does not support per-layer CUDA graphs "'
            ),
            _config("must be enabled when enabling delay_wgrad_compute'"),
        ),
    ),
    Row(
        "`--hybrid-context-parallel`",
        Status.UPSTREAM,
        "Megatron asserts that it is not used with Megatron-FSDP",
        rules=("hybrid-context-parallel",),
        tests=(f"{_ENDS}[hybrid context parallel]",),
        lines=(
            Line(
                CORE,
                _ARGUMENTS,
                "'Hybrid context parallelism not supported with Megatron FSDP'",
            ),
        ),
    ),
    Row(
        "`--yaml-cfg`",
        Status.UPSTREAM,
        "Megatron wants one setting (`account_for_embedding_in_pipeline_split`) both beside and in "
        "a section of the file, and then refuses a setting that is in both: no file passes",
        rules=("yaml-config",),
        tests=(f"{_SHOWN}::test_no_yaml_file_passes_megatrons_own_checks",),
        lines=(
            Line(CORE, _YAML, "if args.account_for_embedding_in_pipeline_split else"),
            Line(CORE, _YAML, "args = SimpleNamespace(**args.__dict__, **args.language_model."),
        ),
    ),
    Row(
        "`--cuda-graph-impl local`",
        Status.UPSTREAM,
        "each replay asserts that no hook but those of Megatron's DDP is on a layer, and the "
        "backward graph adds weight gradients to `main_grad`, which Megatron-FSDP's parameters "
        "have only while a gradient is reduced",
        rules=("implementation",),
        tests=(f"{_SHOWN}::test_local_graphs_refuse_the_hooks_of_megatron_fsdp",),
        lines=(
            Line(CORE, _GRAPHS, '), "Tried to cudagraph a module with user registered'),
            Line(CORE, _GRAPHS, "param.main_grad.add_(wgrad)"),
        ),
    ),
    Row(
        "`--cpu-offloading-num-layers`",
        Status.UPSTREAM,
        "Megatron's config refuses it with layerwise graphs",
        rules=("cpu-offloading",),
        tests=(_REFUSES,),
        lines=(_config('raise ValueError("CUDA graphs not supported with CPU offloading.")'),),
    ),
    Row(
        "`--recompute-modules moe` with `moe_router`",
        Status.UPSTREAM,
        "the recomputed layer would contain the router's graph",
        rules=("moe-recompute-around-router",),
        tests=(_REFUSES,),
        lines=(_config('"moe recompute is not supported with moe_router CUDA graph with: "'),),
    ),
    Row(
        "dropout or jitter in a module that is captured and recomputed",
        Status.UPSTREAM,
        "the recomputation would have to draw the same numbers again inside the graph",
        rules=(
            "dropout-in-recomputed-attention",
            "dropout-in-recomputed-mlp",
            "jitter-in-recomputed-moe",
        ),
        tests=(_REFUSES,),
        lines=(
            _config('"attention dropout is not supported with graphed attention "'),
            _config('"hidden dropout is not supported with graphed MLP/MoE recomputation."'),
            _config('"moe_input_jitter_eps is not supported with graphed moe recomputation."'),
        ),
    ),
    Row(
        "`moe_preprocess` with a capacity factor or router padding",
        Status.UPSTREAM,
        "the dispatcher copies token counts to the host inside of preprocess",
        rules=("preprocess-synchronizes",),
        tests=(_REFUSES,),
        lines=(_config("'DtoH copies and synchronizations in the preprocess step.'"),),
    ),
    Row(
        "scopes that overlap or lack their first part: `moe` with `moe_router`, `moe_preprocess` "
        "without `moe_router`",
        Status.UPSTREAM,
        "Megatron's config refuses them",
        rules=("moe-and-router", "preprocess-without-router"),
        tests=(_REFUSES,),
        lines=(
            _config("'cuda_graph_modules must not contain both moe and moe_router.'"),
            _config("'moe_preprocess cuda graph is only supported with moe_router cuda graph.'"),
        ),
    ),
    Row(
        "`--fp8-param-gather` with blockwise or other block-scaled recipes",
        Status.UPSTREAM,
        "Megatron-FSDP has no double buffers for such weights, and layerwise graphs need them",
        rules=("fp8-primary-weights-recipe",),
        tests=("functional/test_refusals.py::test_block_scaled_weights_have_no_double_buffers",),
        lines=(Line(FSDP, _FSDP_BUFFERS, 'f"No buffer found for bucket_id: {bucket_id}, fsdp'),),
    ),
    Row(
        "`CUDA_DEVICE_MAX_CONNECTIONS=1`",
        Status.UPSTREAM,
        "Megatron-FSDP's gathers could not overlap, and Megatron refuses to start",
        rules=("max-connections",),
        tests=(f"{_ENDS}[one connection]",),
        lines=(Line(CORE, _ARGUMENTS, "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1"),),
    ),
    Row(
        "`expandable_segments:True` without `NCCL_GRAPH_REGISTER=0`",
        Status.UPSTREAM,
        "Megatron refuses it with graphs: NCCL registers buffers that may be unmapped later",
        rules=("expandable-segments",),
        tests=(f"{_ENDS}[expandable segments]",),
        lines=(Line(CORE, _ARGUMENTS, '"Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory'),),
    ),
)
