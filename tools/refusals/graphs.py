"""Features that no CUDA graph can hold, and those that need another flag beside graphs."""

from __future__ import annotations

from tools.refusals.row import CORE, FSDP, TE, TORCH, Line, Row, Status

_DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"
_CONFIG = "megatron/core/transformer/transformer_config.py"
_META = "torch/_meta_registrations.py"
_SWEEP = "unit/tools/plan/test_sweep.py::test_an_option_ends_as_the_table_says"
_MOVED = "unit/runs/test_moved_buffers.py"
_EXPERTS = "unit/arguments/test_experts_refusals_reproduced.py"
_SHOWN = "unit/arguments/test_refusals_reproduced.py"

ROWS = (
    Row(
        "`--moe-router-load-balancing-type sinkhorn` with a captured router",
        Status.GRAPH,
        "its loop ends when a value on the GPU is small enough: the host reads it in every round",
        rules=("sinkhorn-router",),
        tests=(f"{_SWEEP}[router --moe-router-load-balancing-type sinkhorn…]",),
        lines=(Line(CORE, "megatron/core/transformer/moe/moe_utils.py", "while error > tol:"),),
    ),
    Row(
        "`--moe-token-dispatcher-type allgather`, or `flex` by NCCL EP without static shapes, with "
        "captured experts",
        Status.GRAPH,
        "the dispatcher copies the number of each expert's tokens to the host",
        rules=("dispatcher-reads-counts",),
        tests=(
            f"{_SWEEP}[experts --moe-token-dispatcher-type allgather]",
            f"{_EXPERTS}::test_nccl_ep_reads_the_number_of_rows_unless_shapes_are_static",
        ),
        lines=(
            Line(CORE, _DISPATCHER, "tokens_per_expert = self.local_map.sum(dim=0).long().cpu()"),
            Line(CORE, _DISPATCHER, "num_valid = int(self.tokens_per_expert.sum().item())"),
        ),
    ),
    Row(
        "`--moe-hybridep-pad-uneven-dispatch-inputs` in a captured dispatcher",
        Status.GRAPH,
        "the host reads the largest number of tokens of all ranks before each dispatch",
        rules=("hybridep-uneven-inputs",),
        tests=(f"{_EXPERTS}::test_hybridep_pads_to_a_number_that_the_host_reads",),
        lines=(
            Line(CORE, _DISPATCHER, "max_num_tokens_across_ep = torch.tensor("),
            Line(CORE, _DISPATCHER, "padded_num_tokens = int(max_num_tokens_across_ep.item())"),
        ),
    ),
    Row(
        "experts in a graph with a capacity factor without padding, or with router padding",
        Status.GRAPH,
        "how many rows a rank sends differs from step to step, and a graph's shapes do not",
        rules=("experts-uneven",),
        tests=(f"{_EXPERTS}::test_with_a_capacity_the_number_of_rows_depends_on_the_routing",),
        lines=(
            Line(CORE, _CONFIG, "'moe cuda graph is only supported with drop-padding MoE.'"),
            Line(CORE, _DISPATCHER, "self.num_out_tokens = num_local_tokens_per_expert.sum()"),
        ),
    ),
    Row(
        "whole MoE layers: `moe`, or no scope at all",
        Status.SETTING,
        "Transformer Engine's grouped GEMM reads token counts on the host; `--cg-grouped-gemm "
        "torch`, or experts that drop and pad, need no such read ([experts](experts.md))",
        rules=("moe-without-drop-and-pad", "whole-moe-layer"),
        tests=(
            "functional/test_align.py::test_losses_norms_and_shards_are_bit_equal[dropless-ep2]",
        ),
        lines=(
            Line(
                TE,
                "transformer_engine/pytorch/module/grouped_linear.py",
                "m_splits = m_splits.tolist()",
            ),
        ),
    ),
    Row(
        "`--cg-grouped-gemm torch` without `--bf16`, with FP8 or FP4, or with biases",
        Status.GRAPH,
        "torch's grouped GEMM computes in bfloat16 alone and adds no bias",
        rules=("grouped-gemm-dtype", "grouped-gemm-low-precision", "grouped-gemm-bias"),
        tests=(f"{_SHOWN}::test_torchs_grouped_gemm_takes_bfloat16_without_a_bias",),
        lines=(
            Line(TORCH, _META, "Expected inputs of BF16 type but got mat_a.dtype"),
            Line(TORCH, _META, "Bias tensor provided, but it is not supported yet."),
        ),
    ),
    Row(
        "Megatron-FSDP without `--fsdp-double-buffer` or `--fsdp-db-use-persist-buf-on-alloc-fail`",
        Status.SETTING,
        "unsharded parameters then move. A replay sees that and runs eagerly, but parameters that "
        "move before a backward replay end the run",
        rules=("double-buffer", "persistent-fallback"),
        tests=(
            f"{_MOVED}::test_without_double_buffers_what_moves_after_its_forward_replay_ends_the_run",
        ),
    ),
    Row(
        "`--fp8-param-gather` without `--keep-fp8-transpose-cache`",
        Status.SETTING,
        "Megatron-FSDP throws transposed weights away after each use and makes new ones, and a "
        "replayed backward reads where the first ones were. Whether the new ones lie there is up "
        "to the allocator: gradient norms were NaN in one run on GPUs, and right in another",
        rules=("fp8-primary-weights",),
        tests=(
            "unit/hooks/test_mutants_of_hooks.py::"
            "test_fp8_transposes_are_released_after_the_forward_pass",
        ),
        lines=(
            Line(
                FSDP,
                "megatron_fsdp/megatron_fsdp.py",
                "if not self.ddp_config.keep_fp8_transpose_cache:",
            ),
        ),
    ),
)
