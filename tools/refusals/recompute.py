"""Full recompute, and code that was compiled elsewhere."""

from __future__ import annotations

from tools.refusals.row import CORE, TE, Line, Row, Status

_CONFIG = "megatron/core/transformer/transformer_config.py"
_FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
_RANDOM = "megatron/core/tensor_parallel/random.py"
_SHOWN = "unit/arguments/test_recompute_refusals_reproduced.py"
_TRACED = "unit/precompile/test_refused_layers.py"
_LOADED = "unit/integrations/megatron/test_layer_code.py"
_ONE_CHANGE = "unit/arguments/test_rules.py::test_one_change_breaks_its_rule_and_says_why"
_ALIGNED = "functional/test_align.py::test_losses_norms_and_shards_are_bit_equal"
_FULL = "unit/integrations/megatron/test_full_recompute.py"

SUPPORTED = (
    Row(
        "`--recompute-granularity full` with whole layers in graphs",
        Status.SUPPORTED,
        "each layer recomputes itself inside its graph ([memory](memory.md#full-recompute)). With "
        "`--cg-precompile-dir` it runs the loaded code twice",
        tests=(
            f"{_FULL}::test_graphs_train_bit_for_bit_as_eager",
            f"{_LOADED}::test_graphs_of_compiled_layers_train_the_eager_numbers[recomputed]",
            f"{_ALIGNED}[full-recompute…]",
            "functional/test_precompiled.py::"
            "test_a_script_captures_what_was_compiled_from_its_command_line[compiled-recomputed]",
        ),
        lines=(
            Line(CORE, _CONFIG, "full recompute is only supported with full iteration CUDA graph"),
        ),
    ),
)

NOT_YET = (
    Row(
        "`--recompute-granularity full` with graphs of parts of a layer",
        Status.HERE,
        "the checkpoint of a layer is inside its graph. Beside a graph of a part, the rest of the "
        "layer would run without one and keep its activations, without a word; around the graph "
        "the checkpoint would save nothing. The numbers would be right",
        rules=("full-recompute-of-parts",),
        tests=(
            f"{_SHOWN}::test_beside_a_graph_of_a_part_the_rest_of_the_layer_keeps_its_activations",
        ),
    ),
    Row(
        "`--recompute-granularity full` with dropout or jitter",
        Status.HERE,
        "the checkpoint inside a graph is torch's, which draws no numbers again there",
        rules=("dropout-in-full-recompute", "jitter-in-full-recompute"),
        tests=(f"{_FULL}::test_what_draws_again_trains_other_numbers[…]",),
        lines=(Line(CORE, _RANDOM, "if is_graph_warmup() or is_graph_capturing():"),),
    ),
    Row(
        "`--recompute-granularity full` with FP8 or FP4",
        Status.HERE,
        "Transformer Engine's modules ask its own checkpoint whether they run again, and then use "
        "the scales of the first pass. Of torch's checkpoint they know nothing and update their "
        "scales in both passes",
        rules=("low-precision-full-recompute",),
        tests=(f"{_SHOWN}::test_torchs_checkpoint_tells_fp8_modules_of_no_recompute",),
        lines=(
            Line(
                TE,
                "transformer_engine/pytorch/module/base.py",
                "FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)",
            ),
        ),
    ),
    Row(
        "`--recompute-granularity full` behind a frozen embedding",
        Status.UPSTREAM,
        "Megatron's checkpoint is an autograd function of a layer's input alone. If the input "
        "needs no gradient, the layer's weights get none, without graphs too. A capture that has "
        "seen such a step is refused",
        rules=("full-recompute-lost-gradients",),
        tests=(
            f"{_FULL}::test_behind_a_frozen_embedding_megatrons_checkpoint_loses_gradients",
            f"{_FULL}::test_so_such_a_capture_is_refused_and_training_goes_on",
        ),
        lines=(Line(CORE, _RANDOM, "class CheckpointFunction(torch.autograd.Function):"),),
    ),
    Row(
        "`--distribute-saved-activations`",
        Status.HERE,
        "a graph reads its input from static memory of its own, and Megatron's checkpoint, which "
        "divides inputs among ranks, is off in a capture: nothing would be divided",
        rules=("distributed-full-recompute",),
        tests=(f"{_SHOWN}::test_nothing_is_distributed_in_a_capture",),
        lines=(Line(CORE, _RANDOM, "args[0], split_tensor_into_1d_equal_chunks("),),
    ),
    Row(
        "`--recompute-granularity full` in a hybrid model",
        Status.HERE,
        "checkpoints are moved into the layers of a TransformerBlock alone, and this model has a "
        "HybridStack. Inside of Megatron's own checkpoint, the first pass has no gradients, so no "
        "graph is replayed in it",
        rules=("hybrid-full-recompute",),
        tests=(
            f"{_SHOWN}::"
            "test_a_graph_inside_of_megatrons_checkpoint_is_not_replayed_in_the_first_pass",
        ),
        lines=(
            Line(
                CORE,
                "megatron/core/models/hybrid/hybrid_block.py",
                "hidden_states = checkpointed_forward(",
            ),
        ),
    ),
    Row(
        "`--recompute-granularity full --recompute-method uniform` with `--mtp-use-repeated-layer`",
        Status.UPSTREAM,
        "each use of a weight overwrites the gradient of the one before it, while that is being "
        "reduced, and it is reduced again: gradients are lost or counted several times, and on an "
        "H200 two eager runs differ from the first gradient norm on. ZeRO-1 and no sharding, which "
        "add, are refused with it",
        rules=("repeated-prediction-full-recompute",),
        tests=(
            "unit/backends/tape/test_own_loop.py::"
            "test_full_recompute_of_a_repeated_layer_loses_gradients_without_graphs",
        ),
        lines=(Line(CORE, _FSDP, "param.main_grad.copy_(to_local_if_dtensor(param.grad))"),),
    ),
    Row(
        "`--cg-precompile-dir` with Transformer Engine's layers or dropless experts, dropout, or "
        "selective recompute",
        Status.HERE,
        "such layers cannot be traced as one graph: Transformer Engine forbids it, experts read "
        "counts on the host, losses of routers are variables of a module, and dropout and "
        "Megatron's checkpoints keep random states ([compiled once](precompile.md))",
        rules=(
            "precompile-local",
            "precompile-dense",
            "precompile-dropout",
            "precompile-recompute",
        ),
        tests=(
            f"{_TRACED}::test_other_layers_cannot_be_compiled[…]",
            f"{_TRACED}::test_transformer_engine_forbids_to_trace_its_modules[True]",
        ),
        lines=(
            Line(
                TE,
                "transformer_engine/pytorch/jit.py",
                "torch._dynamo.disable(f, recursive=recursive)",
            ),
        ),
    ),
    Row(
        "`--cg-precompile-dir` with fused operations",
        Status.HERE,
        "torch compiles these operations in an eager run, and they round elsewhere than the "
        "separate operations of an artifact",
        rules=("precompile-fusions",),
        tests=(f"{_TRACED}::test_what_megatron_fuses_rounds_elsewhere_than_separate_operations",),
    ),
    Row(
        "`--cg-precompile-dir` with scopes, several kinds of layers, or meta weights",
        Status.HERE,
        "an artifact holds the code of one whole layer, and a step of it is compared with eager "
        "before the model is wrapped. In a graph of a part it would compute the whole layer",
        rules=("precompile-whole-layers", "precompile-one-kind", "precompile-meta-weights"),
        tests=(
            f"{_LOADED}::test_code_of_whole_layers_is_wrong_in_graphs_of_parts",
            f"{_LOADED}::test_all_ranks_refuse_what_one_refuses[another layer…]",
            f"{_LOADED}::test_weights_without_values_cannot_be_compared",
        ),
    ),
)
