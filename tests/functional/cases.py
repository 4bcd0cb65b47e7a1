"""The configurations that the functional suite aligns: a preset, scopes, and Megatron's flags."""

from dataclasses import dataclass, replace

MOE, DENSE, MLA = "qwen3-moe-tiny", "llama-tiny", "deepseek-v3-tiny"
MIXTRAL = "mixtral-tiny"
ROUTER = ("attn", "moe_router")
PREPROCESS = ("attn", "moe_router", "moe_preprocess")
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
FP8 = ("--fp8-format", "hybrid")
TENSORWISE = (*FP8, "--fp8-recipe", "tensorwise")
FP8_WEIGHTS = ("--fp8-param-gather", "--keep-fp8-transpose-cache")
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
FULL = ("--recompute-granularity", "full", "--recompute-method")
UNIFORM = (*FULL, "uniform", "--recompute-num-layers", "1")
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EVALUATED = ("--eval-interval", "5", "--eval-iters", "2", "--split", "90,5,5")
EP2 = ("--expert-model-parallel-size", "2")
TORCH_GEMM = ("--cg-grouped-gemm", "torch")
"""For the graph run alone, against Transformer Engine's GEMM; in ``flags`` for both runs."""
PEER_MEMORY = ("--cg-moe-exchange", "peer")
"""For the graph run alone: tokens go to the memory of other GPUs directly."""
PEERS = (*TORCH_GEMM, *PEER_MEMORY)
CUBLAS_GEMM = ("--cg-grouped-gemm", "cublas")
DEVICE_COUNTS = "cuBLASLt's grouped GEMM with counts on the device"
_PARTS = ("moe_act", "layernorm", "mla_up_proj")
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", *_PARTS)
OVERLAP = ("--moe-shared-expert-overlap", "--moe-shared-expert-gate")
CAPACITY = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
NATIVE = ("--cg-backend", "native")
VERIFIED = ("--cg-verify-interval", "2", "--cg-on-mismatch", "error")
LOCAL = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-masked-softmax-fusion")
"""As without Apex: its norm and Megatron's fused softmax are packages that need not be there."""
EXPANDABLE = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
ZERO2 = ("--data-parallel-sharding-strategy", "optim_grads")
ZERO1 = ("--data-parallel-sharding-strategy", "optim")
FINE = ("--megatron-fsdp-enable-fine-grained-param-gather",)
HSDP = ("--num-distributed-optimizer-instances", "2")
CHECKPOINT = ("--save-interval", "6", "--save", "{directory}/{run}/checkpoints")
UNCLIPPED_EP2 = (*EP2, "--clip-grad", "0")
"""Under v2, Megatron's norm of gradients fails with experts on ranks of their own, eagerly too."""
EXPERTS, MLP = ("attn", "moe"), ("attn", "mlp")
ONE_EACH = ("--expert-tensor-parallel-size", "1")
SAVES = "--save-activations-interval"
"""Steps whose activations are saved run eagerly."""


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
    """A module without which the case cannot run, or :data:`DEVICE_COUNTS`."""
    graph_flags: tuple[str, ...] = ()
    """This package's flags, for the graph run."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of both runs."""
    bf16: bool = True
    """False: the model is in fp32."""
    fsdp_version: int = 1
    """As ``--megatron-fsdp-version``; 2 is of megatron-core 0.20."""
    scenario: str = ""
    """What ``tampered.py`` does in both runs."""


def batch(size: int) -> tuple[str, ...]:
    return ("--global-batch-size", str(size))


Row = tuple[str, str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Name, preset, scopes, Megatron's flags, and this package's flags of the run with graphs."""


def _cases(prefix: str, *rows: Row) -> list[Case]:
    return [
        Case(f"{prefix}{name}", preset, scopes, (*batch(8), *flags), graph_flags=ours)
        for name, preset, scopes, flags, ours in rows
    ]


def _grid() -> list[Case]:
    """All scopes of a router's layer under every kind of parallelism in the support table."""
    split = (*TENSOR_PARALLEL, *EP2, "--expert-tensor-parallel-size", "2")
    layouts: dict[str, tuple[tuple[str, ...], int]] = {
        "dp2": (batch(8), 2),
        "tp2": ((*batch(4), *TENSOR_PARALLEL), 2),
        "ep2": ((*batch(8), *EP2), 2),
        "ep2-etp2": ((*batch(8), *split), 4),
    }
    return [
        Case(f"preprocess-{name}", MOE, PREPROCESS, flags, gpus)
        for name, (flags, gpus) in layouts.items()
    ]


def _dropless() -> list[Case]:
    """Graphs that hold whole MoE layers without drop and pad."""

    def row(
        name: str,
        *flags: str,
        preset: str = MOE,
        scopes: tuple[str, ...] = EXPERTS,
        ours: tuple[str, ...] = (),
    ) -> Row:
        return name, preset, scopes, flags, (*TORCH_GEMM, *ours)

    return _cases(
        "dropless-",
        # The input gradient of fc1 sums 2,048 terms to a narrow output, which cuBLAS may split.
        row("ep1-mixtral", *TORCH_GEMM, preset=MIXTRAL),
        row("ep1-zero2", *ZERO2),
        row("ep2", *EP2),
        row("ep2-tp2", *EP2, *TENSOR_PARALLEL, *ONE_EACH),
        row("ep2-whole-layer", *EP2, scopes=()),
        row("ep2-evaluation", *EP2, *EVALUATED, "--empty-unused-memory-level", "2"),
        row("ep2-permute-fusion", *EP2, "--moe-permute-fusion"),
        row("ep2-shared-experts", *EP2, *RECOMPUTED, preset=MLA),
        # In a graph as many rows as 192 of each expert, eagerly 96: grouped_mm takes other tiles.
        row("ep2-few-rows", *EP2, "--seq-length", "192"),
        row("ep2-verified", *EP2, ours=VERIFIED),
        row("ep2-native", *EP2, ours=NATIVE),
        row("ep2-no-fast-path", *EP2, ours=("--cg-no-fsdp-fast-path",)),
        row("ep2-layers", *EP2, ours=("--cg-layers", "attn:0-1", "moe:1-")),
        # As many rows as any routing sends to one of two ranks: no step is repeated.
        row("ep2-rows-evaluation", *EP2, *EVALUATED, ours=("--cg-moe-rows", "2")),
    )


def _realistic() -> list[Case]:
    """Widths of real models, two layers. Both runs have torch's grouped GEMM: see experts.md."""
    mixtral = (
        *("--hidden-size", "2048", "--ffn-hidden-size", "7168", "--moe-ffn-hidden-size", "7168"),
        *("--num-attention-heads", "16", "--num-query-groups", "4", "--seq-length", "2048"),
        *("--max-position-embeddings", "2048", "--micro-batch-size", "1"),
    )
    dense_first = ("--moe-layer-freq", "([0]*1+[1]*1)")
    rows: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
        ("dropless-realistic-qwen3", "qwen3-moe", (), ()),
        ("dropless-realistic-deepseek-v3", "deepseek-v3", dense_first, ()),
        ("dropless-realistic-mixtral", MIXTRAL, mixtral, ()),
        ("peers-realistic-qwen3", "qwen3-moe", (), PEERS),
    )
    same = (*batch(4), *EP2, "--num-layers", "2", *TORCH_GEMM)
    return [
        Case(name, preset, EXPERTS, (*same, *flags), graph_flags=ours)
        for name, preset, flags, ours in rows
    ]


def _dropless_by_cublas() -> list[Case]:
    """Whole dropless MoE layers with cuBLASLt's grouped GEMM, in BF16 and FP8."""
    blockwise = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
    ours, peers = CUBLAS_GEMM, (*CUBLAS_GEMM, *PEER_MEMORY)
    # Transformer Engine's GEMM for each expert splits such sums, so both runs have cuBLASLt's.
    long = (*EP2, *CUBLAS_GEMM, "--moe-ffn-hidden-size", "7168")
    rows = _cases(
        "cublas-",
        ("ep1", MOE, EXPERTS, (), ours),
        ("ep2", MOE, EXPERTS, EP2, ours),
        ("peers", MOE, EXPERTS, EP2, peers),
        ("ep2-rows-evaluation", MOE, EXPERTS, (*EP2, *EVALUATED), (*ours, "--cg-moe-rows", "2")),
        ("shared-experts", MLA, EXPERTS, (*EP2, *RECOMPUTED), (*ours, *VERIFIED)),
        ("long", MIXTRAL, EXPERTS, (*long, *EVALUATED), VERIFIED),
        ("capacity", MOE, EXPERTS, (*CAPACITY, *CUBLAS_GEMM), ()),
        ("fp8-ep1", MOE, EXPERTS, TENSORWISE, ours),
        ("fp8-ep2", MOE, EXPERTS, (*EP2, *TENSORWISE), ours),
        ("fp8-peers", MOE, EXPERTS, (*EP2, *TENSORWISE), peers),
        ("fp8-evaluation", MOE, EXPERTS, (*EP2, *TENSORWISE, *EVALUATED), peers),
        ("fp8-verified", MOE, (), (*EP2, *TENSORWISE), (*peers, *VERIFIED)),
        ("fp8-weights", MOE, EXPERTS, (*EP2, *TENSORWISE, *FP8_WEIGHTS), ours),
        ("fp8-recomputed", MOE, EXPERTS, (*EP2, *TENSORWISE, *RECOMPUTED[:-1]), ours),
        ("fp8-long", MIXTRAL, EXPERTS, (*long, *TENSORWISE), (*PEER_MEMORY, *VERIFIED)),
        ("fp8-blockwise", MOE, EXPERTS, (*EP2, *blockwise), (*ours, *VERIFIED)),
        # A router with groups, sigmoid and bias, whose ranks get very different numbers of rows.
        ("fp8-groups-peers", MLA, EXPERTS, (*EP2, *TENSORWISE), peers),
        ("fp8-groups-blockwise", MLA, EXPERTS, (*EP2, *blockwise), ours),
    )
    return [replace(case, needs=DEVICE_COUNTS) for case in rows]


def _capacity_and_fp8() -> list[Case]:
    """Experts that drop and pad, and FP8. Torch's grouped GEMM takes no FP8 and no fp32."""
    recipes = (
        ("delayed", "hybrid", ()),
        ("delayed", "hybrid", FP8_WEIGHTS),
        ("tensorwise", "hybrid", FP8_WEIGHTS),
        ("blockwise", "e4m3", ()),
    )
    return _cases(
        "",
        ("capacity", MOE, EXPERTS, CAPACITY, ()),
        ("capacity-torch-gemm", MOE, EXPERTS, CAPACITY, TORCH_GEMM),
        ("capacity-whole-layer", MOE, (), (*EP2, *CAPACITY), ()),
        ("fp8-capacity-weights", MOE, EXPERTS, (*CAPACITY, *FP8, *FP8_WEIGHTS), ()),
        *(
            (
                f"fp8-{recipe}{'-weights' if more else ''}",
                DENSE,
                MLP,
                ("--fp8-format", fp8_format, "--fp8-recipe", recipe, *more),
                VERIFIED,
            )
            for recipe, fp8_format, more in recipes
        ),
    )


CASES = [
    *_grid(),
    *_dropless(),
    *_realistic(),
    *_dropless_by_cublas(),
    *_capacity_and_fp8(),
    # A shared expert that runs beside the exchange of tokens, on a stream of its own.
    *_cases(
        "overlapped-",
        ("router", MLA, ROUTER, (*OVERLAP, *EP2), VERIFIED),
        ("capacity", MLA, EXPERTS, (*OVERLAP, *EP2, *CAPACITY, *RECOMPUTED), ()),
        ("dropless-ep2", MLA, EXPERTS, (*OVERLAP, *EP2), TORCH_GEMM),
    ),
    # Graphs that exchange tokens by peer memory.
    *_cases(
        "peers-",
        ("ep2", MOE, EXPERTS, EP2, PEERS),
        ("ep2-tp2", MOE, EXPERTS, (*EP2, *TENSOR_PARALLEL, *ONE_EACH), PEERS),
        ("evaluation", MOE, EXPERTS, (*EP2, *EVALUATED), PEERS),
        ("overlapped", MLA, EXPERTS, (*EP2, *OVERLAP), PEERS),
        ("native", MOE, EXPERTS, EP2, (*PEERS, *NATIVE)),
    ),
    # Captured by torch alone; Megatron's local layers have no kernel of Transformer Engine's.
    *_cases(
        "native-",
        ("dense", DENSE, MLP, DROPOUT, NATIVE),
        ("ep2", MOE, PREPROCESS, EP2, NATIVE),
        ("tp2", DENSE, MLP, TENSOR_PARALLEL, NATIVE),
        ("local-dense", DENSE, MLP, (*LOCAL, *DROPOUT), NATIVE),
    ),
    # Whole layers that recompute themselves in their graphs.
    *_cases(
        "full-recompute-",
        ("whole-layer", DENSE, (), UNIFORM, ()),
        ("block", DENSE, MLP, (*FULL, "block", "--recompute-num-layers", "2"), ()),
        ("tp2", DENSE, (), (*UNIFORM, *TENSOR_PARALLEL), ()),
        ("dropless-ep2", MOE, EXPERTS, (*UNIFORM, *EP2), TORCH_GEMM),
        ("native", DENSE, (), UNIFORM, NATIVE),
    ),
    *_cases(
        "",
        ("dense", DENSE, MLP, (), ()),
        ("whole-layer", DENSE, (), (), ()),
        ("four-microbatches", DENSE, MLP, batch(16), ()),
        ("hybrid-sharding", MOE, ("attn",), HSDP, ()),
        ("zero2", MOE, ROUTER, ZERO2, ()),
        ("zero1", DENSE, MLP, ZERO1, ()),
        ("recompute", MOE, ("moe_router",), RECOMPUTE, ()),
        ("recompute-in-graph", DENSE, MLP, RECOMPUTE, ()),
        ("inference-rng", DENSE, MLP, (*DROPOUT, "--inference-rng-tracker"), ()),
        ("fine-grained-gathering", DENSE, MLP, FINE, ()),
        ("verified-dropout", DENSE, MLP, DROPOUT, VERIFIED),
        ("verified-moe-fp8", MOE, ROUTER, FP8, VERIFIED),
        ("context-parallel", DENSE, MLP, ("--context-parallel-size", "2"), ()),
        ("no-warmup", DENSE, MLP, (), ("--cuda-graph-warmup-steps", "0")),
        ("layers-between", MOE, ROUTER, (), ("--cg-layers", "attn:0,2", "moe_router:0,2")),
        ("latent-attention", MLA, PREPROCESS, RECOMPUTED, ()),
        (
            "delayed-gradients",
            MOE,
            PREPROCESS,
            (*EP2, "--overlap-dispatch-backward-with-experts-wgrad"),
            (),
        ),
        (
            "saved-passes",
            MOE,
            EXPERTS,
            (*EP2, SAVES, "5", "--save-dgrads-interval", "5", *CHECKPOINT),
            (*TORCH_GEMM, "--cg-moe-rows", "2"),
        ),
    ),
    Case("ramp-up", MOE, ROUTER, (*batch(16), "--rampup-batch-size", "8", "8", "48")),
    Case("fp32", DENSE, MLP, batch(8), bf16=False),
    Case("fp32-capacity", MOE, EXPERTS, (*batch(8), *CAPACITY), bf16=False),
    Case(
        "expandable-segments",
        DENSE,
        MLP,
        (*batch(4), *TENSOR_PARALLEL),
        env=(EXPANDABLE, ("NCCL_GRAPH_REGISTER", "0")),
    ),
    Case(
        "cutlass", MOE, PREPROCESS, (*batch(8), *EP2), env=(("NVTE_USE_CUTLASS_GROUPED_GEMM", "1"),)
    ),
    Case("mamba", "mamba-hybrid-tiny", ("mamba", "attn"), batch(8), needs="mamba_ssm"),
]


def _with_settings() -> list[Case]:
    """Other cases once more, each with settings of Megatron's or torch's that no case has."""
    moments = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
    gradients = (
        *("--megatron-fsdp-main-grads-dtype", "bf16"),
        *("--megatron-fsdp-grad-comm-dtype", "bf16"),
    )
    profiled = (  # From before the capture until after some replays.
        *("--profile", "--use-pytorch-profiler", "--record-memory-history"),
        *("--profile-step-start", "2", "--profile-step-end", "8"),
        *("--tensorboard-dir", "{directory}/{run}/tensorboard"),
        *("--memory-snapshot-path", "{directory}/{run}/snapshot.pickle"),
    )
    reuse = ("PYTORCH_CUDA_ALLOC_CONF", "graph_capture_record_stream_reuse:True")
    rows: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]], ...] = (
        (
            "meta",
            ("dense", "dropless-ep2", "fp8-delayed-weights", "native-local-dense"),
            ("--init-model-with-meta-device",),
            (),
        ),
        ("moments", ("dropless-ep2",), ("--use-precision-aware-optimizer", *moments), ()),
        ("bf16-gradients", ("dense",), gradients, ()),
        ("profiled", ("dropless-ep2",), profiled, ()),
        ("streams", ("native-tp2",), (), (reuse,)),
        ("held", ("dropless-ep2",), (), (("TORCH_NCCL_AVOID_RECORD_STREAMS", "1"),)),
        ("registered", ("dropless-ep2",), ("--use-nccl-ub", "--fsdp-manual-registration"), ()),
        ("largest", ("dropless-ep2",), ("--megatron-fsdp-max-pool-double-buffer",), ()),
    )
    known = {case.name: case for case in CASES}
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


FEATURES = _with_settings()

UNDER_V2 = [
    replace(case, fsdp_version=2)
    for case in _cases(
        "v2-",
        ("dense", DENSE, MLP, DROPOUT, VERIFIED),
        ("whole-layer", DENSE, (), EVALUATED, ()),
        ("full-recompute", DENSE, (), UNIFORM, ()),
        ("preprocess-ep2", MOE, PREPROCESS, UNCLIPPED_EP2, ()),
        ("dropless-ep2-evaluation", MOE, EXPERTS, (*UNCLIPPED_EP2, *EVALUATED), TORCH_GEMM),
        ("dropless-ep2-whole-layer", MOE, (), UNCLIPPED_EP2, TORCH_GEMM),
        ("peers-ep2", MOE, EXPERTS, UNCLIPPED_EP2, PEERS),
    )
]
"""Under Megatron-FSDP v2."""
