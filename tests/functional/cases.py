"""The configurations that the functional suite aligns: a preset, scopes, and Megatron's flags."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOE, DENSE, MLA = "qwen3-moe-tiny", "llama-tiny", "deepseek-v3-tiny"
MIXTRAL = "mixtral-tiny"
ROUTER = ("attn", "moe_router")
PREPROCESS = ("attn", "moe_router", "moe_preprocess")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
FP8 = ("--fp8-format", "hybrid")
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
FULL = ("--recompute-granularity", "full", "--recompute-method")
UNIFORM = (*FULL, "uniform", "--recompute-num-layers", "1")
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EVALUATED = ("--eval-interval", "5", "--eval-iters", "2", "--split", "90,5,5")
EP2 = ("--expert-model-parallel-size", "2")
TORCH_GEMM = ("--cg-grouped-gemm", "torch")
"""For the graph run alone, against Transformer Engine's GEMM; in ``flags`` for both runs."""
PEERS = (*TORCH_GEMM, "--cg-moe-exchange", "peer")
"""For the graph run alone: tokens go to the memory of other GPUs directly."""
MOE_ACT = ("--recompute-granularity", "selective", "--recompute-modules", "moe_act")
OVERLAP = ("--moe-shared-expert-overlap", "--moe-shared-expert-gate")
CAPACITY = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
NATIVE = ("--cg-backend", "native")
VERIFIED = ("--cg-verify-interval", "2", "--cg-on-mismatch", "error")
LOCAL = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion")
"""As without Apex: its norm and Megatron's fused softmax are packages that need not be there."""
EXPANDABLE = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


@dataclass(frozen=True)
class Case:
    """One alignment; ``gpus`` 2 where not said."""

    name: str
    preset: str
    scopes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    gpus: int = 2
    steps: int = 12
    needs: str = ""
    """A module without which the case cannot run."""
    graph_flags: tuple[str, ...] = ()
    """This package's flags, for the graph run."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of both runs."""
    bf16: bool = True
    """False: the model is in fp32."""


def batch(size: int) -> tuple[str, ...]:
    """``--global-batch-size``; the presets' micro batch is 2."""
    return ("--global-batch-size", str(size))


def _grid() -> list[Case]:
    """Every scope list of the support table, under every kind of parallelism in it."""
    scopes = {"attn": ("attn",), "router": ("moe_router",), "preprocess": PREPROCESS}
    layouts = {
        "dp2": (batch(8), 2),
        "tp2": ((*batch(4), *TENSOR_PARALLEL), 2),
        "ep2": ((*batch(8), "--expert-model-parallel-size", "2"), 2),
        "ep2-etp2": (
            (
                *batch(8),
                *TENSOR_PARALLEL,
                *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"),
            ),
            4,
        ),
    }
    return [
        Case(f"{name}-{layout}", MOE, chosen, flags, gpus)
        for layout, (flags, gpus) in layouts.items()
        for name, chosen in scopes.items()
    ]


EXPERTS = ("attn", "moe")


def _dropless() -> list[Case]:
    """Graphs that hold whole MoE layers without drop and pad."""
    one = ("--expert-tensor-parallel-size", "1")
    rows = (
        ("ep1", MOE, EXPERTS, ()),
        ("ep1-tp2", MOE, EXPERTS, (*TENSOR_PARALLEL, *one)),
        # The input gradient of fc1 sums 2,048 terms to a narrow output, which cuBLAS may split.
        ("ep1-mixtral", MIXTRAL, EXPERTS, TORCH_GEMM),
        ("ep1-zero2", MOE, EXPERTS, ("--data-parallel-sharding-strategy", "optim_grads")),
        ("ep2", MOE, EXPERTS, EP2),
        ("ep2-tp2", MOE, EXPERTS, (*EP2, *TENSOR_PARALLEL, *one)),
        ("ep2-mixtral", MIXTRAL, EXPERTS, (*EP2, *TORCH_GEMM)),
        ("ep2-whole-layer", MOE, (), EP2),
        ("ep2-recompute", MOE, EXPERTS, (*EP2, *MOE_ACT)),
        ("ep2-dropout", MOE, EXPERTS, (*EP2, *DROPOUT)),
        ("ep2-evaluation", MOE, EXPERTS, (*EP2, *EVALUATED)),
        ("ep2-permute-fusion", MOE, EXPERTS, (*EP2, "--moe-permute-fusion")),
        ("ep2-shared-experts", MLA, EXPERTS, EP2),
        ("ep2-routing-replay", MOE, EXPERTS, (*EP2, "--moe-enable-routing-replay")),
        ("ep2-inference-rng", MOE, EXPERTS, (*EP2, *DROPOUT, "--inference-rng-tracker")),
        # In a graph as many rows as 192 of each expert, eagerly 96: grouped_mm takes other tiles.
        ("ep2-few-rows", MOE, EXPERTS, (*EP2, "--seq-length", "192")),
        ("router-ep2", MOE, PREPROCESS, EP2),
    )
    return [
        Case(f"dropless-{name}", preset, scopes, (*batch(8), *flags), graph_flags=TORCH_GEMM)
        for name, preset, scopes, flags in rows
    ]


def _peers() -> list[Case]:
    """Graphs that exchange tokens by peer memory."""
    rows = (
        ("ep2", MOE, EXPERTS, ()),
        ("ep2-tp2", MOE, EXPERTS, (*TENSOR_PARALLEL, "--expert-tensor-parallel-size", "1")),
        ("whole-layer", MOE, (), ()),
        ("mixtral", MIXTRAL, EXPERTS, TORCH_GEMM),
        ("recompute", MOE, EXPERTS, MOE_ACT),
        ("evaluation", MOE, EXPERTS, EVALUATED),
        ("shared-experts", MLA, EXPERTS, ()),
        ("overlapped", MLA, EXPERTS, OVERLAP),
    )
    made = [
        Case(f"peers-{name}", preset, scopes, (*batch(8), *EP2, *flags), graph_flags=PEERS)
        for name, preset, scopes, flags in rows
    ]
    native = Case("peers-native", MOE, EXPERTS, (*batch(8), *EP2), graph_flags=(*PEERS, *NATIVE))
    realistic = [
        replace(case, name=f"peers-{case.name.removeprefix('dropless-')}", graph_flags=PEERS)
        for case in _realistic()
    ]
    return [*made, native, *realistic]


def _overlapped() -> list[Case]:
    """A shared expert that runs beside the exchange of tokens, on a stream of its own."""
    rows = (
        ("router", ROUTER, EP2, ()),
        ("preprocess", PREPROCESS, EP2, VERIFIED),
        ("preprocess-tp2", PREPROCESS, TENSOR_PARALLEL, ()),
        ("preprocess-native", PREPROCESS, EP2, NATIVE),
        ("capacity", EXPERTS, (*EP2, *CAPACITY), ()),
        ("dropless-ep1", EXPERTS, (), TORCH_GEMM),
        ("dropless-ep2", EXPERTS, EP2, TORCH_GEMM),
        ("dropless-whole-layer", (), EP2, TORCH_GEMM),
    )
    return [
        Case(f"overlapped-{name}", MLA, scopes, (*batch(8), *OVERLAP, *flags), graph_flags=ours)
        for name, scopes, flags, ours in rows
    ]


def _realistic() -> list[Case]:
    """Widths of real models, two layers. Both runs have torch's grouped GEMM: see experts.md."""
    mixtral = (
        *("--hidden-size", "2048", "--ffn-hidden-size", "7168", "--moe-ffn-hidden-size", "7168"),
        *("--num-attention-heads", "16", "--num-query-groups", "4", "--seq-length", "2048"),
        *("--max-position-embeddings", "2048", "--micro-batch-size", "1"),
    )
    shapes = (
        ("qwen3", "qwen3-moe", ()),
        ("deepseek-v3", "deepseek-v3", ("--moe-layer-freq", "([0]*1+[1]*1)")),
        ("mixtral", MIXTRAL, mixtral),
    )
    return [
        Case(
            f"dropless-realistic-{name}",
            preset,
            EXPERTS,
            (*batch(4), *EP2, "--num-layers", "2", *flags, *TORCH_GEMM),
            steps=12,
        )
        for name, preset, flags in shapes
    ]


CASES = [
    *_grid(),
    *_dropless(),
    *_overlapped(),
    *_realistic(),
    *_peers(),
    Case("dropless-same-gemm", MOE, EXPERTS, (*batch(8), *EP2, *TORCH_GEMM)),
    Case("router-dp2-together", MOE, ROUTER, batch(8)),
    *(
        Case(
            f"capacity{name}",
            MOE,
            EXPERTS,
            (*batch(8), *CAPACITY),
            graph_flags=flags,
        )
        for name, flags in (("", ()), ("-torch-gemm", TORCH_GEMM))
    ),
    Case("dense", DENSE, ("attn", "mlp"), batch(8)),
    Case("whole-layer", DENSE, (), batch(8)),
    Case("one-microbatch", DENSE, ("attn", "mlp"), batch(4)),
    Case("four-microbatches", DENSE, ("attn", "mlp"), batch(16)),
    Case(
        "hybrid-sharding",
        MOE,
        ("attn",),
        (*batch(8), "--num-distributed-optimizer-instances", "2"),
    ),
    Case("fp32", DENSE, ("attn", "mlp"), batch(8), bf16=False),
    Case("fp32-moe", MOE, PREPROCESS, batch(8), bf16=False),
    Case("fp8", MOE, ROUTER, (*batch(8), *FP8)),
    Case("fp8-fp32", DENSE, ("attn", "mlp"), (*batch(8), *FP8), bf16=False),
    *(
        Case(
            f"fp8-{recipe}{'-weights' if weights else ''}",
            DENSE,
            ("attn", "mlp"),
            (
                *batch(8),
                *("--fp8-format", fp8_format, "--fp8-recipe", recipe),
                *(("--fp8-param-gather", "--keep-fp8-transpose-cache") if weights else ()),
            ),
        )
        for recipe, fp8_format, weights in (
            ("delayed", "hybrid", False),
            ("delayed", "hybrid", True),
            ("tensorwise", "hybrid", False),
            ("tensorwise", "hybrid", True),
            ("blockwise", "e4m3", False),
        )
    ),
    Case("zero2", MOE, ROUTER, (*batch(8), "--data-parallel-sharding-strategy", "optim_grads")),
    Case(
        "zero1", DENSE, ("attn", "mlp"), (*batch(8), "--data-parallel-sharding-strategy", "optim")
    ),
    Case(
        "evaluation",
        MOE,
        ROUTER,
        (*batch(8), *EVALUATED),
    ),
    Case(
        "evaluation-tp2",
        MOE,
        ROUTER,
        (
            *batch(4),
            *TENSOR_PARALLEL,
            *EVALUATED,
        ),
    ),
    Case("ramp-up", MOE, ROUTER, (*batch(16), "--rampup-batch-size", "8", "8", "48")),
    Case("recompute", MOE, ("moe_router",), (*batch(8), *RECOMPUTE)),
    Case("recompute-in-graph", DENSE, ("attn", "mlp"), (*batch(8), *RECOMPUTE)),
    Case("recompute-fp8", MOE, ("moe_router",), (*batch(8), *RECOMPUTE, *FP8)),
    # Whole layers that recompute themselves in their graphs.
    *(
        replace(case, name=f"full-recompute-{case.name}", flags=(*batch(8), *case.flags))
        for case in (
            Case("whole-layer", DENSE, (), UNIFORM),
            Case("block", DENSE, ("attn", "mlp"), (*FULL, "block", "--recompute-num-layers", "2")),
            Case("chunks", DENSE, (), (*FULL, "uniform", "--recompute-num-layers", "2")),
            Case("tp2", DENSE, (), (*UNIFORM, *TENSOR_PARALLEL)),
            Case("evaluation", DENSE, (), (*UNIFORM, *EVALUATED)),
            Case(
                "zero2", DENSE, (), (*UNIFORM, "--data-parallel-sharding-strategy", "optim_grads")
            ),
            Case("dropless-ep2", MOE, EXPERTS, (*UNIFORM, *EP2), graph_flags=TORCH_GEMM),
            Case("capacity", MOE, EXPERTS, (*UNIFORM, *CAPACITY)),
            Case("native", DENSE, (), UNIFORM, graph_flags=NATIVE),
            Case("verified", DENSE, (), UNIFORM, graph_flags=VERIFIED),
        )
    ),
    Case("dropout", DENSE, ("attn", "mlp"), (*batch(8), *DROPOUT)),
    Case(
        "inference-rng",
        DENSE,
        ("attn", "mlp"),
        (*batch(8), *DROPOUT, "--inference-rng-tracker"),
    ),
    Case("routing-replay", MOE, ROUTER, (*batch(8), "--moe-enable-routing-replay")),
    Case("dropout-router", MOE, ROUTER, (*batch(8), *DROPOUT)),
    Case("dropout-fp8", MOE, ROUTER, (*batch(8), *DROPOUT, *FP8)),
    Case("dropout-recompute", MOE, ("moe_router",), (*batch(8), *DROPOUT, *RECOMPUTE)),
    Case(
        "learning-rate",
        MOE,
        ROUTER,
        (
            *batch(8),
            *("--lr", "1e-3", "--min-lr", "1e-5"),
            *("--lr-decay-style", "cosine", "--lr-warmup-iters", "5"),
        ),
    ),
    Case(
        "expandable-segments",
        DENSE,
        ("attn", "mlp"),
        (*batch(4), *TENSOR_PARALLEL),
        env=(EXPANDABLE, ("NCCL_GRAPH_REGISTER", "0")),
    ),
    Case(
        "fine-grained-gathering",
        DENSE,
        ("attn", "mlp"),
        (*batch(8), "--megatron-fsdp-enable-fine-grained-param-gather"),
    ),
    *(
        Case(f"verified-{name}", preset, scopes, (*batch(8), *flags), graph_flags=VERIFIED)
        for name, preset, scopes, flags in (
            ("dropout", DENSE, ("attn", "mlp"), DROPOUT),
            ("moe-fp8", MOE, ROUTER, FP8),
        )
    ),
    Case("context-parallel", DENSE, ("attn", "mlp"), (*batch(4), "--context-parallel-size", "2")),
    Case(
        "no-warmup",
        DENSE,
        ("attn", "mlp"),
        batch(8),
        graph_flags=("--cuda-graph-warmup-steps", "0"),
    ),
    Case("no-fast-path", MOE, ROUTER, batch(8), graph_flags=("--cg-no-fsdp-fast-path",)),
    Case("layers", MOE, ROUTER, batch(8), graph_flags=("--cg-layers", "attn:0-1", "moe_router:1-")),
    *(
        Case(
            f"layers-without-graphs-{name}",
            MOE,
            ROUTER,
            batch(8),
            graph_flags=("--cg-layers", f"attn:{layers}", f"moe_router:{layers}"),
        )
        for name, layers in (("around", "1"), ("between", "0,2"))
    ),
    Case(
        "checkpoint",
        MOE,
        ROUTER,
        (*batch(8), *("--save-interval", "6", "--save", "{directory}/{run}/checkpoints")),
    ),
    # Captured by torch alone; Megatron's local layers have no kernel of Transformer Engine's.
    *(
        Case(f"native-{name}", preset, scopes, (*batch(8), *flags), graph_flags=NATIVE)
        for name, preset, scopes, flags in (
            ("dense", DENSE, ("attn", "mlp"), DROPOUT),
            ("whole-layer", DENSE, (), ()),
            ("moe", MOE, PREPROCESS, ()),
            ("ep2", MOE, PREPROCESS, EP2),
            ("evaluation", MOE, ROUTER, EVALUATED),
            ("local-dense", DENSE, ("attn", "mlp"), (*LOCAL, *DROPOUT)),
        )
    ),
    Case("native-tp2", DENSE, ("attn", "mlp"), (*batch(4), *TENSOR_PARALLEL), graph_flags=NATIVE),
    Case("latent-attention", MLA, PREPROCESS, batch(8)),
    Case(
        "cutlass",
        MOE,
        PREPROCESS,
        (*batch(8), "--expert-model-parallel-size", "2"),
        env=(("NVTE_USE_CUTLASS_GROUPED_GEMM", "1"),),
    ),
    Case("mamba", "mamba-hybrid-tiny", ("mamba", "attn"), batch(8), needs="mamba_ssm"),
]
