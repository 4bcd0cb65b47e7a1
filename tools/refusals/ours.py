"""Features that are supported beside graphs, and those that this package does not support yet."""

from __future__ import annotations

from tools.refusals.row import CORE, Line, Row, Status

_CORE = "megatron/core/transformer"
_SHOWN = "unit/arguments/test_refusals_reproduced.py"
_EXPERTS = "unit/arguments/test_experts_refusals_reproduced.py"
_OFFLOAD = "megatron/core/pipeline_parallel/fine_grained_activation_offload.py"
_OFFLOADED = "unit/arguments/test_offloading_reproduced.py"
_FUSED = "unit/fsdp/test_accumulation_fusion.py"
_SHARED = "unit/moe/test_shared_expert.py"
_PACKED = "unit/runs/test_packed_sequences.py"
_FORMS = "unit/integrations/megatron/test_packs.py"
_IN_PACKS = "functional/test_packed.py::test_losses_norms_and_shards_are_those_of_eager"
_ALIGNED = "functional/test_align.py::test_losses_norms_and_shards_are_bit_equal"
_DELAYED = "unit/moe/test_delayed_gradients.py"
_LOGGED = "unit/moe/test_logged_passes.py"

SUPPORTED = (
    Row(
        "`--mtp-use-repeated-layer` with several prediction layers",
        Status.SUPPORTED,
        "the layer that predicts stays eager, because it runs several times before its first "
        "backward pass; the decoder's layers have graphs",
        tests=(
            "unit/backends/tape/test_own_loop.py::test_losses_and_norms_are_equal_to_eager["
            "mtp-repeated…]",
            "unit/backends/tape/test_own_loop.py::test_losses_and_norms_are_equal_to_eager["
            "dropless-mtp-repeated…]",
            "functional/test_own_loop.py::test_losses_and_gradient_norms_are_equal_to_eager",
        ),
    ),
    Row(
        "`--moe-enable-routing-replay`",
        Status.SUPPORTED,
        "passes in which a router records or repeats its choice run eagerly; the others replay",
        tests=(
            "unit/replay/guard/test_routing.py::test_what_a_router_records_is_as_in_an_eager_run",
            f"{_ALIGNED}[routing-replay]",
            f"{_ALIGNED}[dropless-ep2-routing-replay]",
        ),
        lines=(
            Line(
                CORE,
                f"{_CORE}/moe/router_replay.py",
                "if self.router_replay_action == RouterReplayAction.RECORD:",
            ),
        ),
    ),
    Row(
        "packed sequences (`--sft`, `--rl-use-sequence-packing`, "
        "`--dataloader-inter-document-masking`) with scopes behind attention",
        Status.SUPPORTED,
        "attention runs eagerly, on any lengths; tokens of a pack are as many in each step",
        tests=(
            f"{_PACKED}::test_graphs_behind_attention_replay",
            f"{_PACKED}::test_samples_that_a_pack_joins_are_not_balanced_as_one",
            f"{_IN_PACKS}[packed-mlp]",
            f"{_IN_PACKS}[packed-router]",
        ),
    ),
    Row(
        "packed sequences with captured attention",
        Status.SETTING,
        "add `--cg-pack-sequences N` to the run and to the eager run that it is compared with "
        "([below](#packed-sequences)). Megatron alone passes a pack's boundaries as an object, and "
        "its graphs take tensors alone (NVIDIA/Megatron-LM#5619, #3869)",
        rules=("packed-sequences", "pack-sequences-least"),
        tests=(
            f"{_PACKED}::test_attention_replays",
            f"{_PACKED}::test_another_form_runs_eagerly",
            f"{_PACKED}::test_without_a_bound_a_graph_of_attention_would_never_be_replayed",
            f"{_PACKED}::test_megatrons_own_replay_takes_no_pack",
            f"{_IN_PACKS}[packed-attention]",
            f"{_IN_PACKS}[packed-whole-layers]",
            f"{_IN_PACKS}[packed-moe]",
            f"{_IN_PACKS}[packed-experts]",
        ),
        lines=(
            Line(
                CORE,
                f"{_CORE}/transformer_layer.py",
                '"inference_context and packed_seq_params are excluded from input list. "',
            ),
        ),
    ),
    Row(
        "`--overlap-dispatch-backward-with-experts-wgrad` with experts outside of the graphs",
        Status.SUPPORTED,
        "their weight gradients are computed as without graphs",
        tests=(
            f"{_DELAYED}::test_beside_graphs_of_routers_gradients_are_those_of_eager",
            f"{_ALIGNED}[delayed-gradients…]",
        ),
    ),
    Row(
        "`--save-activations-interval`, `--save-dgrads-interval`",
        Status.SUPPORTED,
        "Megatron puts hooks on the modules in the graphs for such a step, so it runs eagerly, "
        "also with `--cg-moe-rows`; the other steps replay. `--save-tokens-per-expert-interval` "
        "saves nothing under Megatron-FSDP, without graphs as well",
        tests=(
            f"{_LOGGED}::test_a_step_whose_passes_are_saved_runs_eagerly_once[…]",
            f"{_LOGGED}::test_tokens_of_experts_are_not_saved_under_megatron_fsdp",
            f"{_ALIGNED}[saved-passes…]",
        ),
    ),
    Row(
        "`--inference-rng-tracker`",
        Status.SUPPORTED,
        "dropout draws from the default generator, in replays too",
        tests=(
            "unit/runs/test_inference_rng.py::test_replays_draw_what_eager_passes_draw",
            f"{_ALIGNED}[inference-rng]",
            f"{_ALIGNED}[dropless-ep2-inference-rng]",
        ),
    ),
    Row(
        "`--fp8-format` without `--bf16`",
        Status.SUPPORTED,
        "weights and activations are fp32 outside of GEMMs",
        tests=(f"{_ALIGNED}[fp8-fp32]",),
    ),
    Row(
        "`--moe-shared-expert-overlap`",
        Status.SUPPORTED,
        "whole MoE layers hold all stages of the shared expert. Graphs of `moe_router` and "
        "`moe_preprocess` hold the first, and the others run beside the exchange as before",
        tests=(
            f"{_SHARED}::test_every_loss_and_norm_is_megatrons[…]",
            f"{_SHARED}::test_megatron_alone_fails_in_its_second_warmup_pass",
            f"{_ALIGNED}[overlapped-…]",
        ),
        lines=(
            Line(
                CORE,
                f"{_CORE}/moe/shared_experts.py",
                "must be called from",
            ),
        ),
    ),
    Row(
        "gradient-accumulation fusion with ZeRO-2 or ZeRO-3",
        Status.SUPPORTED,
        "while graphs live, layers hand over their gradients instead of writing them into "
        "Megatron-FSDP's buckets; both are the same GEMM, and the copy is not saved",
        tests=(
            f"{_FUSED}::test_with_graphs_every_loss_and_norm_is_that_of_eager_fusion[…]",
            "functional/test_fusion.py::test_losses_norms_and_shards_are_those_of_eager_fusion",
        ),
    ),
)

NOT_YET = (
    Row(
        "`--optimizer-cuda-graph`",
        Status.HERE,
        "drop it: Megatron-FSDP begins the first all-gather at the end of the optimizer's step, "
        "and no forward pass could wait for one inside of a graph (NVIDIA/Megatron-LM#4663). "
        "Beside the fast path a graph of the step saved nothing",
        rules=("optimizer-graph",),
        tests=(f"{_SHOWN}::test_the_optimizers_step_begins_a_gather_that_the_next_pass_waits_for",),
        lines=(
            Line(
                CORE,
                "megatron/training/training.py",
                "# causes an error when we wait() on a CUDA kernel launched in a stream beyond",
            ),
        ),
    ),
    Row(
        "gradient-accumulation fusion with ZeRO-1 or `no_shard`, with weights whose gradients one "
        "rank has alone (as many expert-parallel ranks as GPUs), with gradients of another dtype, "
        "with `--transformer-impl local`, or with `--use-transformer-engine-op-fuser`",
        Status.HERE,
        "bits would differ from eager fusion. Where gradients are not sharded eager fusion itself "
        "is wrong: each microbatch overwrites the gradients of the one before it",
        rules=("gradient-accumulation-fusion",),
        tests=(
            f"{_FUSED}::test_without_them_a_microbatch_overwrites_the_one_before[…]",
            f"{_FUSED}::test_nor_where_one_rank_has_all_of_a_gradient",
            f"{_FUSED}::test_if_it_were_a_replay_would_hand_over_the_placeholder",
        ),
        lines=(
            Line(
                CORE,
                "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py",
                "param.overwrite_main_grad = True",
            ),
        ),
    ),
    Row(
        "`--cg-pack-sequences` with context parallelism, mRoPE or `--cg-precompile-dir`, or with "
        "captured attention of a hybrid model; packed sequences with captured Mamba mixers or "
        "several samples in a microbatch",
        Status.HERE,
        "a context-parallel rank has two parts of each sequence, whose positions are computed on "
        "the host; mRoPE's table has a row for each token of a pack; an artifact has no input for "
        "boundaries; HybridModel's mixers read an index of sequences from the object that graphs "
        "do not take; Megatron joins samples that its graphs have separate",
        rules=(
            "pack-sequences-context-parallel",
            "pack-sequences-mrope",
            "pack-sequences-compiled",
            "pack-sequences-hybrid",
            "packed-mamba",
            "packed-microbatches",
        ),
        tests=(
            f"{_FORMS}::test_packs_of_context_parallel_ranks_stay_as_they_are",
            f"{_FORMS}::test_mrope_is_refused",
            f"{_FORMS}::test_hybrid_models_pass_packs_on_as_they_are",
            f"{_PACKED}::test_compiled_code_takes_no_boundaries",
            f"{_PACKED}::test_without_a_bound_a_graph_of_attention_would_never_be_replayed",
            f"{_PACKED}::test_joined_samples_of_a_microbatch_are_never_replayed",
        ),
    ),
    Row(
        "`--fine-grained-activation-offloading`",
        Status.HERE,
        "the backward graph of a layer reloads the activations of the layer before it, and host "
        "buffers of graphs return to the pool that eager layers take theirs from. One layer that "
        "runs eagerly beside replays makes gradients wrong, without an error. If all layers replay "
        "in each step, the bits are those of eager (the CPU tape; 12 steps on an H200)",
        rules=("activation-offloading",),
        tests=(
            f"{_OFFLOADED}::test_the_graph_of_a_layer_reloads_for_the_layer_before",
            f"{_OFFLOADED}::test_an_eager_layer_takes_the_host_buffers_of_a_graph",
            f"{_OFFLOADED}::test_with_all_layers_in_each_step_offloading_has_the_eager_bits",
        ),
        lines=(
            Line(CORE, _OFFLOAD, "# Reload the next layer group"),
            Line(CORE, _OFFLOAD, "self._cpu_tensor_pool.reset()"),
        ),
    ),
    Row(
        "`--cg-backend native` with FP8 or FP4",
        Status.HERE,
        "graphs of the native backend do not update the scales of quantized tensors; "
        "`--cg-backend te` does",
        rules=("native-backend-fp8",),
        tests=(
            "unit/backends/test_native_refusals.py::"
            "test_fp8_is_refused_at_capture_and_seen_by_the_guard",
        ),
    ),
    Row(
        "`--cg-grouped-gemm torch` with `--use-transformer-engine-op-fuser`",
        Status.HERE,
        "Transformer Engine's fused experts have a grouped GEMM of their own, and the one that is "
        "replaced is not called",
        rules=("grouped-gemm-op-fuser",),
        tests=(f"{_EXPERTS}::test_fused_experts_do_not_call_the_grouped_gemm_that_is_replaced",),
        lines=(Line(CORE, f"{_CORE}/moe/experts.py", "output = self._fused_forward("),),
    ),
    Row(
        "`--overlap-dispatch-backward-with-experts-wgrad` or `--delay-wgrad-compute` with experts "
        "in a graph, or with `--cg-grouped-gemm torch`",
        Status.HERE,
        "Python code stores delayed gradients outside of what autograd returns, so a replay reads "
        "and writes memory that was freed. torch's grouped GEMM computes them at once: the numbers "
        "are right, and nothing is delayed",
        rules=("grouped-gemm-delayed-gradients", "experts-delayed-gradients"),
        tests=(
            f"{_DELAYED}::test_a_replay_reads_a_gradient_that_was_freed",
            f"{_DELAYED}::test_torchs_grouped_gemm_delays_nothing",
        ),
        lines=(Line(CORE, f"{_CORE}/moe/moe_layer.py", "param.post_wgrad_grad_acc_hook()"),),
    ),
    Row(
        "dropless experts in a graph with `--moe-router-load-balancing-type quantile_balancing`",
        Status.HERE,
        "Megatron's config takes graphs of whole MoE layers only as drop and pad. This package "
        "shows it such a config, and that is refused with quantile balancing",
        rules=("experts-router",),
        tests=("unit/moe/test_install.py::test_a_router_that_is_not_known_is_refused_by_its_name",),
        lines=(
            Line(
                CORE,
                f"{_CORE}/transformer_config.py",
                "elif self.moe_router_load_balancing_type not in [",
            ),
        ),
    ),
    Row(
        "dropless experts in a graph, split over tensor-parallel ranks",
        Status.HERE,
        "the ranks of an expert exchange rows by numbers that Megatron reads on the host. This "
        "package's dispatcher, which reads none, has no such exchange; with "
        "`--expert-tensor-parallel-size 1` experts are captured",
        rules=("experts-tensor-parallel",),
        tests=(
            f"{_EXPERTS}::test_several_ranks_of_an_expert_exchange_rows_by_numbers_on_the_host",
        ),
        lines=(
            Line(
                CORE,
                f"{_CORE}/moe/token_dispatcher.py",
                "output_split_sizes = self.output_splits_tp.tolist()",
            ),
        ),
    ),
    Row(
        "dropless experts in a graph with the dispatcher `flex`",
        Status.HERE,
        "DeepEP waits on the host for its counts, and so does HybridEP without a rank's capacity, "
        "as Megatron's own comments say. NCCL EP with static shapes has no such wait. None of "
        "these packages was run here",
        rules=("experts-dispatcher",),
        tests=(
            f"{_EXPERTS}::test_deepeps_rows_are_as_many_as_the_routing_says",
            f"{_EXPERTS}::test_hybridep_pads_to_a_number_that_the_host_reads",
            f"{_EXPERTS}::test_nccl_ep_reads_the_number_of_rows_unless_shapes_are_static",
        ),
        lines=(
            Line(CORE, f"{_CORE}/moe/fused_a2a.py", "# so this is not compatible with CUDA graph"),
            Line(
                CORE,
                f"{_CORE}/moe/token_dispatcher.py",
                "# after permute op, None means no up-bound, will cause a CPU sync",
            ),
        ),
    ),
    Row(
        "`--cg-moe-rows` with passes outside of Megatron's schedule, or with gradients that two "
        "of its calls sum",
        Status.HERE,
        "a step in which a rank receives more rows is repeated by the schedule, with cleared "
        "gradients",
        rules=("rows-outside-schedule", "rows-second-call"),
        tests=(
            "unit/integrations/megatron/test_repeat.py::"
            "test_replays_outside_of_the_schedule_end_before_the_update",
            "unit/integrations/megatron/test_repeat.py::"
            "test_a_second_call_for_the_same_gradients_is_refused",
        ),
    ),
    Row(
        "`--moe-routing-trace-path` with a captured router",
        Status.HERE,
        "Megatron writes the choices from hooks on the routers, and a replay runs no hook of a "
        "module inside the graph. With scope `attn` they are written",
        rules=("routing-trace",),
        tests=(f"{_LOGGED}::test_a_captured_router_has_no_trace[…]",),
        lines=(
            Line(
                CORE,
                f"{_CORE}/moe/router_trace.py",
                "Note: Python forward hooks do not fire during CUDA graph replay.",
            ),
        ),
    ),
)
