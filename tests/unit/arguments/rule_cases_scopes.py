"""Cases of scopes: which exist, which exclude each other, and on which layers."""

from __future__ import annotations

from tests.unit.arguments.rule_case import DROP_AND_PAD, Case, modules

SCOPES = (
    Case(
        "moe-and-router",
        modules("moe", "moe_router", **DROP_AND_PAD),
        "both moe and moe_router",
        "captured twice",
        "--cuda-graph-modules attn moe_router",
    ),
    Case(
        "preprocess-without-router",
        modules("attn", "moe_preprocess"),
        "moe_preprocess without moe_router",
        "continuation of the router's graph",
        "--cuda-graph-modules attn moe_router moe_preprocess",
    ),
    Case(
        "moe-without-experts",
        {"num_experts": None},
        "moe_router in a model without experts",
        "parts of a MoE layer",
        "--num-experts 8",
    ),
    Case(
        "moe-without-drop-and-pad",
        modules("attn", "moe"),
        "moe without drop-and-pad",
        "reads it on the CPU",
        "--cg-grouped-gemm torch",
    ),
    Case(
        "moe-without-drop-and-pad",
        modules("attn", "moe"),
        "moe without drop-and-pad",
        "differs from step to step",
        "--moe-pad-expert-input-to-capacity",
    ),
    Case(
        "moe-without-drop-and-pad",
        modules("attn", "moe", moe_expert_capacity_factor=1.0),
        "moe without drop-and-pad",
        "differs from step to step",
        "--moe-expert-capacity-factor 1.0",
    ),
    Case(
        "preprocess-synchronizes",
        modules("moe_router", "moe_preprocess", moe_expert_capacity_factor=1.0),
        "dispatcher-type alltoall",
        "waits for them",
        "drop moe_preprocess",
    ),
    Case(
        "preprocess-synchronizes",
        modules("moe_router", "moe_preprocess", moe_router_padding_for_fp8=True),
        "router padding for FP8",
        "waits for them",
        "drop moe_preprocess",
    ),
    Case(
        "scope-selects-nothing",
        modules("attn", "mlp"),
        "--cuda-graph-modules mlp",
        "none of the model's 4 layers has a dense MLP",
        "drop mlp",
    ),
    Case(
        "scope-selects-nothing",
        modules("attn", "mlp", moe_layer_freq=(1, 1, 1, 1)),
        "--cuda-graph-modules mlp",
        "none of the model's 4 layers",
        "drop mlp",
    ),
)

SCOPES_BEYOND_MEGATRON = (
    Case(
        "preprocess-synchronizes",
        modules("moe_router", "moe_preprocess", moe_router_padding_for_quantization=True),
        "router padding for FP8 or FP4",
        "waits for them",
        "drop moe_preprocess",
    ),
    Case(
        "scope-selects-nothing",
        modules("attn", "mamba"),
        "--cuda-graph-modules mamba",
        "has a Mamba mixer",
        "drop mamba from --cuda-graph-modules",
    ),
    Case(
        "scope-selects-nothing",
        modules("attn", "moe_router", hybrid_layer_pattern="E|E/**"),
        "--cuda-graph-modules attn",
        "none of the model's 2 layers has attention",
        "drop attn",
    ),
    Case(
        "scope-selects-nothing",
        {"moe_layer_freq": (0, 0, 1, 1)},
        "leaves moe_router on no layer",
        "first layer with it is layer 2",
        "--cg-layers moe_router:2-",
        layers=("moe_router:0-1",),
    ),
    Case(
        "whole-moe-layer",
        modules(),
        "4 of them MoE layers",
        "read back to the CPU",
        "--cuda-graph-modules attn moe_router",
    ),
    Case(
        "whole-moe-layer",
        modules(moe_layer_freq=(0, 1, 1, 1)),
        "the first is layer 2",
        "read back to the CPU",
        "--cg-layers layer:0",
        layers=("layer:0,2-",),
    ),
    Case("cg-layers", {}, "--cg-layers attn", "no colon", "attn:0-23", layers=("attn",)),
    Case(
        "cg-layers",
        {},
        "--cg-layers moe_router:2-9",
        "last index is 3",
        "--cg-layers moe_router:2-",
        layers=("moe_router:2-9",),
    ),
)
