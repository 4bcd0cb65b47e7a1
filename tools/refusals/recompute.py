"""Full recompute, and code that was compiled elsewhere."""

from __future__ import annotations

from tools.refusals.row import CORE, Line, Row, Status

_CONFIG = "megatron/core/transformer/transformer_config.py"
_FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
_ONE_CHANGE = "unit/arguments/test_rules.py::test_one_change_breaks_its_rule_and_says_why"
_ALIGNED = "functional/test_align.py::test_losses_norms_and_shards_are_bit_equal"
_FULL = "unit/integrations/megatron/test_full_recompute.py"

SUPPORTED = (
    Row(
        "`--recompute-granularity full` with whole layers in graphs",
        Status.SUPPORTED,
        "each layer recomputes itself inside its graph ([memory](memory.md#full-recompute))",
        tests=(
            f"{_FULL}::test_graphs_train_bit_for_bit_as_eager",
            f"{_ALIGNED}[full-recompute…]",
        ),
        lines=(
            Line(CORE, _CONFIG, "full recompute is only supported with full iteration CUDA graph"),
        ),
    ),
)

NOT_YET = (
    Row(
        "`--recompute-granularity full` with graphs of parts of a layer, dropout, jitter, FP8 or "
        "FP4, `--distribute-saved-activations`, or in a hybrid model",
        Status.HERE,
        "the checkpoint of a layer is inside its graph, and is torch's: it draws no numbers again "
        "and keeps no FP8 state; a hybrid model has no TransformerBlock that it could move from",
        rules=(
            "full-recompute-of-parts",
            "dropout-in-full-recompute",
            "jitter-in-full-recompute",
            "low-precision-full-recompute",
            "distributed-full-recompute",
            "hybrid-full-recompute",
        ),
        tests=(
            f"{_ONE_CHANGE}[full-recompute-of-parts…]",
            f"{_FULL}::test_what_draws_again_trains_other_numbers[…]",
            f"{_ONE_CHANGE}[low-precision-full-recompute…]",
            f"{_ONE_CHANGE}[distributed-full-recompute…]",
            f"{_ONE_CHANGE}[hybrid-full-recompute…]",
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
        "`--cg-precompile-dir` with Transformer Engine's layers or backend, scopes, experts, "
        "several kinds of layers, dropout, recompute, meta weights or fused operations",
        Status.HERE,
        "an artifact holds the traced code of one whole dense layer of Megatron's local "
        "implementation ([compiled once](precompile.md))",
        rules=(
            *("precompile-backend", "precompile-local", "precompile-whole-layers"),
            *("precompile-dense", "precompile-one-kind", "precompile-dropout"),
            *("precompile-recompute", "precompile-meta-weights", "precompile-fusions"),
        ),
        tests=(f"{_ONE_CHANGE}[precompile-…]",),
    ),
)
