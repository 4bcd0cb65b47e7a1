"""Further alignments: features beside graphs, and whole MoE layers with what other cases have."""

from __future__ import annotations

from dataclasses import replace

from tests.functional.cases import (
    CAPACITY,
    CASES,
    EP2,
    EVALUATED,
    EXPERTS,
    FP8,
    MOE,
    NATIVE,
    ON_META,
    PREPROCESS,
    ROUTER,
    TORCH_GEMM,
    VERIFIED,
    Case,
    batch,
)

SAVES = "--save-activations-interval"
"""Steps whose activations are saved run eagerly."""
_SAVED = (
    *(SAVES, "5", "--save-dgrads-interval", "5"),
    *("--save-interval", "12", "--save", "{directory}/{run}/checkpoints"),
)
_DELAYED = ("--overlap-dispatch-backward-with-experts-wgrad",)
_FP8_WEIGHTS = (*FP8, "--fp8-param-gather", "--keep-fp8-transpose-cache")
_HSDP = ("--num-distributed-optimizer-instances", "2")


def _whole_moe_layers() -> list[Case]:
    """Dropless experts in the graphs; other cases have the same with dense layers or routers."""
    zero1 = ("--data-parallel-sharding-strategy", "optim")
    fine = ("--megatron-fsdp-enable-fine-grained-param-gather",)
    checkpoint = ("--save-interval", "6", "--save", "{directory}/{run}/checkpoints")
    rows = (
        ("ep1-zero1", zero1, ()),
        ("ep1-hybrid-sharding", _HSDP, ()),
        ("ep2-fine-grained-gathering", (*EP2, *fine), ()),
        ("ep2-context-parallel", (*EP2, "--context-parallel-size", "2"), ()),
        ("ep2-checkpoint", (*EP2, *checkpoint), ()),
        ("ep2-verified", EP2, VERIFIED),
        ("ep2-native", EP2, NATIVE),
        ("ep2-no-fast-path", EP2, ("--cg-no-fsdp-fast-path",)),
        ("ep2-no-warmup", EP2, ("--cuda-graph-warmup-steps", "0")),
        ("ep2-layers", EP2, ("--cg-layers", "attn:0-1", "moe:1-")),
        # As many rows as any routing sends to one of two ranks: no step is repeated.
        ("ep2-rows", EP2, ("--cg-moe-rows", "2")),
        ("ep2-rows-evaluation", (*EP2, *EVALUATED), ("--cg-moe-rows", "2")),
    )
    return [
        Case(
            f"dropless-{name}", MOE, EXPERTS, (*batch(8), *flags), graph_flags=(*TORCH_GEMM, *ours)
        )
        for name, flags, ours in rows
    ]


def _made_on_meta() -> list[Case]:
    """One of each family, whose weights get their values after the wrapping."""
    named = {case.name: case for case in (*CASES, *_whole_moe_layers())}
    return [
        replace(named[name], name=f"meta-{name}", flags=(*named[name].flags, *ON_META))
        for name in (
            *("dense", "whole-layer", "preprocess-ep2", "native-dense", "native-local-dense"),
            *("dropless-ep2", "dropless-ep2-rows", "peers-ep2", "overlapped-dropless-ep2"),
            *("full-recompute-whole-layer", "latent-attention", "zero2", "dropout-router"),
            *("fp8", "fp8-delayed-weights", "native-tp2", "hybrid-sharding", "mamba"),
        )
    ]


FEATURES = [
    *_whole_moe_layers(),
    *_made_on_meta(),
    Case("delayed-gradients", MOE, ROUTER, (*batch(8), *EP2, *_DELAYED)),
    Case("delayed-gradients-preprocess", MOE, PREPROCESS, (*batch(8), *EP2, *_DELAYED)),
    Case("saved-passes", MOE, ROUTER, (*batch(8), *_SAVED)),
    Case("saved-passes-dropless", MOE, EXPERTS, (*batch(8), *EP2, *_SAVED), graph_flags=TORCH_GEMM),
    Case(
        "saved-passes-rows",
        MOE,
        EXPERTS,
        (*batch(8), *EP2, *_SAVED),
        graph_flags=(*TORCH_GEMM, "--cg-moe-rows", "2"),
    ),
    # Experts that drop and pad: torch's grouped GEMM takes no FP8 and no fp32.
    Case("fp8-capacity", MOE, EXPERTS, (*batch(8), *CAPACITY, *FP8)),
    Case("fp8-fp32-router", MOE, ROUTER, (*batch(8), *FP8), bf16=False),
    Case("fp8-fp32-capacity", MOE, EXPERTS, (*batch(8), *CAPACITY, *FP8), bf16=False),
    Case("fp8-delayed-weights-router", MOE, ROUTER, (*batch(8), *_FP8_WEIGHTS)),
    Case("fp8-delayed-weights-capacity", MOE, EXPERTS, (*batch(8), *CAPACITY, *_FP8_WEIGHTS)),
    Case("fp32-capacity", MOE, EXPERTS, (*batch(8), *CAPACITY), bf16=False),
    Case("capacity-whole-layer", MOE, (), (*batch(8), *EP2, *CAPACITY)),
    Case(
        "routing-replay-capacity",
        MOE,
        EXPERTS,
        (*batch(8), *CAPACITY, "--moe-enable-routing-replay"),
    ),
]
