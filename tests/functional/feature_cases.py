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
    PREPROCESS,
    ROUTER,
    TORCH_GEMM,
    VERIFIED,
    Case,
    batch,
)
from tests.functional.life_cases import META

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


_PROFILED = (
    *("--profile", "--use-pytorch-profiler", "--record-memory-history"),
    *("--profile-step-start", "2", "--profile-step-end", "8"),
    *("--tensorboard-dir", "{directory}/{run}/tensorboard"),
    *("--memory-snapshot-path", "{directory}/{run}/snapshot.pickle"),
)
"""From before the capture until after some replays."""
_MOMENTS = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
_GRADIENTS = ("--megatron-fsdp-main-grads-dtype", "bf16", "--megatron-fsdp-grad-comm-dtype", "bf16")
_REGISTERED = ("--use-nccl-ub", "--fsdp-manual-registration")
_ALLOCATOR, _NCCL = "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS"


def _with_settings() -> list[Case]:
    """Other cases once more, each with settings of Megatron's or torch's that no case has.

    On the meta device Megatron-FSDP (0.19.2) makes no model whose shared experts have a gate.
    """
    families = (
        *("dense", "attn-tp2", "preprocess-ep2", "latent-attention", "capacity"),
        *("dropless-ep2", "peers-ep2", "dropless-ep2-rows", "full-recompute-dropless-ep2"),
        *("hybrid-sharding", "fp8", "fp8-delayed-weights", "native-ep2", "native-local-dense"),
        "mamba",
    )
    both = ("dense", "dropless-ep2")
    evaluated = ("evaluation", "dropless-ep2-evaluation")
    streams = ("attn-tp2", "dropless-ep2", "native-tp2")
    recomputed = ("moe_act", "layernorm", "mla_up_proj")
    rows = (
        ("meta", families, META, ()),
        ("moments", both, ("--use-precision-aware-optimizer", *_MOMENTS), ()),
        ("bf16-gradients", both, _GRADIENTS, ()),
        ("profiled", both, _PROFILED, ()),
        ("emptied", evaluated, ("--empty-unused-memory-level", "2"), ()),
        (
            "recomputed",
            ("latent-attention", "dropless-ep2-shared-experts", "overlapped-capacity"),
            ("--recompute-granularity", "selective", "--recompute-modules", *recomputed),
            (),
        ),
        ("streams", streams, (), ((_ALLOCATOR, "graph_capture_record_stream_reuse:True"),)),
        ("held", streams, (), ((_NCCL, "1"),)),
        ("registered", both, _REGISTERED, ()),
        ("registered-here", ("dense",), (*_REGISTERED, "--disable-symmetric-registration"), ()),
    )
    known = {case.name: case for case in (*CASES, *_whole_moe_layers())}
    return [
        replace(
            known[name],
            name=f"{prefix}-{name}",
            flags=(*known[name].flags, *flags),
            env=(*known[name].env, *env),
        )
        for prefix, names, flags, env in rows
        for name in names
    ]


FEATURES = [
    *_whole_moe_layers(),
    *_with_settings(),
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
