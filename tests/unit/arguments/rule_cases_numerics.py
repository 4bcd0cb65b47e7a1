"""Cases of recomputation, offloading, precision, and inputs that change their shape."""

from __future__ import annotations

from typing import Any

from tests.unit.arguments.rule_case import DROP_AND_PAD, Case, modules

_SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}

_FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "num_experts": None,
    **modules("attn", "mlp"),
}
_UNKNOWN_LAYERS: dict[str, Any] = {"custom_layers": True}

RECOMPUTE = (
    Case(
        "full-recompute-of-parts",
        {**_FULL, **modules("attn")},
        "a part of a layer (layer 0)",
        "recompute around a graph saves no memory",
        "drop --cuda-graph-modules",
    ),
    Case(
        "full-recompute-of-parts",
        {**_FULL, **modules("attn", "moe_router"), "num_experts": 8},
        "a part of a layer (layer 0)",
        "of the whole layer",
        "attn moe (experts, with --cg-grouped-gemm torch",
    ),
    Case(
        "full-recompute-of-parts",
        {**_FULL, **modules("attn", "moe"), **DROP_AND_PAD, "num_experts": 8, "moe_layer_freq": 2},
        "a part of a layer (layer 1)",
        "of the whole layer",
        "--recompute-granularity selective",
    ),
    Case(
        "full-recompute-of-parts",
        _FULL,
        "a part of a layer (layer 2)",
        "of the whole layer",
        "capture whole layers",
        layers=("attn:0-1",),
    ),
    Case(
        "full-recompute-of-parts",
        {**_FULL, **_UNKNOWN_LAYERS},
        "a part of a layer",
        "of the whole layer",
        "drop --cuda-graph-modules",
    ),
    Case(
        "dropout-in-full-recompute",
        {**_FULL, "attention_dropout": 0.1},
        "--attention-dropout 0.1 and --hidden-dropout 0.0",
        "same random numbers",
        "--attention-dropout 0 --hidden-dropout 0",
    ),
    Case(
        "dropout-in-full-recompute",
        {**_FULL, "hidden_dropout": 0.1},
        "--attention-dropout 0.0 and --hidden-dropout 0.1",
        "same random numbers",
        "--attention-dropout 0 --hidden-dropout 0",
    ),
    Case(
        "jitter-in-full-recompute",
        {**_FULL, "moe_input_jitter_eps": 0.01},
        "--moe-input-jitter-eps 0.01",
        "same random numbers",
        "drop --moe-input-jitter-eps",
    ),
    Case(
        "low-precision-full-recompute",
        {**_FULL, "fp8": "hybrid"},
        "full with FP8 or FP4",
        "Transformer Engine",
        "drop --fp8-format",
    ),
    Case(
        "low-precision-full-recompute",
        {**_FULL, "fp4": "e2m1"},
        "full with FP8 or FP4",
        "Transformer Engine",
        "drop --fp8-format",
    ),
    Case(
        "full-recompute-of-parts",
        {**_FULL, "num_experts": 8, "moe_layer_freq": (0, 0, 0, 1), "mtp_num_layers": 1},
        "a part of a layer (layer 4)",
        "of the whole layer",
        "capture whole layers",
        layers=("attn:0-2",),
    ),
    Case(
        "hybrid-full-recompute",
        {**_FULL, "hybrid_layer_pattern": "*-*-"},
        "a hybrid model",
        "HybridStack",
        "--recompute-granularity selective",
    ),
    Case(
        "repeated-prediction-full-recompute",
        {
            **{**_FULL, "recompute_method": "uniform"},
            **{"mtp_use_repeated_layer": True, "mtp_num_layers": 2},
        },
        "--mtp-use-repeated-layer and --mtp-num-layers 2",
        "Gradients are lost or counted several times",
        "--recompute-method block",
    ),
    Case(
        "distributed-full-recompute",
        {**_FULL, "distribute_saved_activations": True},
        "--distribute-saved-activations",
        "static memory of its own",
        "--sequence-parallel",
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
        {**_SELECTIVE, **modules("mlp"), "recompute_modules": ("mlp",), "num_experts": None},
        "--hidden-dropout 0.1",
        "same random numbers",
        "--hidden-dropout 0",
    ),
    Case(
        "dropout-in-recomputed-mlp",
        {**_SELECTIVE, **modules("moe"), **DROP_AND_PAD, "recompute_modules": ("moe",)},
        "--hidden-dropout 0.1",
        "same random numbers",
        "leave mlp and moe out",
    ),
    Case(
        "jitter-in-recomputed-moe",
        {
            **_SELECTIVE,
            **modules("moe"),
            **DROP_AND_PAD,
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
        "would make gradients wrong",
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
    *(
        Case(
            "packed-sequences",
            {**modules(*scopes), **change},
            "with captured attention",
            "cu_seqlens",
            "add --cg-pack-sequences N",
        )
        for scopes, change in (
            (("attn", "moe_router"), {"sft": True}),
            (("attn", "moe_router"), {"rl_use_sequence_packing": True}),
            (("attn", "moe_router"), {"dataloader_inter_document_masking": True}),
            ((), {"sft": True, "num_experts": None}),
        )
    ),
    Case(
        "packed-mamba",
        {
            **modules("mamba"),
            **{"sft": True, "hybrid_layer_pattern": "M*", "num_experts": None},
        },
        "with captured Mamba mixers",
        "which sequence each token belongs to",
        "type --cuda-graph-modules mlp",
    ),
    Case(
        "packed-microbatches",
        {**modules("moe_router"), "sft": True, "micro_batch_size": 2},
        "with --micro-batch-size 2",
        "joins the samples of a microbatch",
        "type --micro-batch-size 1",
    ),
    Case(
        "pack-sequences-hybrid",
        {**modules("attn"), "hybrid_layer_pattern": "M*-", "num_experts": None},
        "captured attention of a hybrid model",
        "HybridModel passes packs on as they are",
        "type --cuda-graph-modules mlp",
        graph={"cg_pack_sequences": 8},
    ),
    Case(
        "pack-sequences-least",
        {},
        "--cg-pack-sequences 0",
        "the most sequences that a pack has",
        "type --cg-pack-sequences 64",
        graph={"cg_pack_sequences": 0},
    ),
    Case(
        "pack-sequences-context-parallel",
        {**modules("attn", "moe_router"), "context_parallel_size": 2},
        "--cg-pack-sequences with --context-parallel-size 2",
        "two parts of every sequence",
        "type --context-parallel-size 1",
        graph={"cg_pack_sequences": 8},
    ),
    Case(
        "hybrid-context-parallel",
        {"hybrid_context_parallel": True},
        "--hybrid-context-parallel",
        "several lengths",
        "drop --hybrid-context-parallel",
    ),
)
