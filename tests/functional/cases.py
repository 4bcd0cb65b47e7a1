"""The configurations that the functional suite aligns: a preset, scopes, and Megatron's flags."""

from __future__ import annotations

from dataclasses import dataclass

MOE, DENSE, MLA = "qwen3-moe-tiny", "llama-tiny", "deepseek-v3-tiny"
ROUTER = ("attn", "moe_router")
PREPROCESS = ("attn", "moe_router", "moe_preprocess")


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


def batch(size: int) -> tuple[str, ...]:
    """``--global-batch-size``; the presets' micro batch is 2."""
    return ("--global-batch-size", str(size))


def _grid() -> list[Case]:
    """Every scope list of the support table, under every kind of parallelism in it."""
    scopes = {"attn": ("attn",), "router": ("moe_router",), "preprocess": PREPROCESS}
    layouts = {
        "dp2": (batch(8), 2),
        "tp2": ((*batch(4), "--tensor-model-parallel-size", "2", "--sequence-parallel"), 2),
        "ep2": ((*batch(8), "--expert-model-parallel-size", "2"), 2),
        "ep2-etp2": (
            (
                *batch(8),
                *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
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


CASES = [
    *_grid(),
    Case("router-dp2-together", MOE, ROUTER, batch(8)),
    Case(
        "capacity",
        MOE,
        ("attn", "moe"),
        (
            *batch(8),
            *("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"),
        ),
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
    Case("fp8", MOE, ROUTER, (*batch(8), "--fp8-format", "hybrid")),
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
        (*batch(8), "--eval-interval", "5", "--eval-iters", "2", "--split", "90,5,5"),
    ),
    Case("ramp-up", MOE, ROUTER, (*batch(16), "--rampup-batch-size", "8", "8", "48")),
    Case(
        "recompute",
        MOE,
        ("moe_router",),
        (*batch(8), *("--recompute-granularity", "selective", "--recompute-modules", "core_attn")),
    ),
    Case(
        "dropout",
        DENSE,
        ("attn", "mlp"),
        (*batch(8), "--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
    ),
    Case(
        "fine-grained-gathering",
        DENSE,
        ("attn", "mlp"),
        (*batch(8), "--megatron-fsdp-enable-fine-grained-param-gather"),
    ),
    Case("context-parallel", DENSE, ("attn", "mlp"), (*batch(4), "--context-parallel-size", "2")),
    Case(
        "no-warmup",
        DENSE,
        ("attn", "mlp"),
        batch(8),
        graph_flags=("--cuda-graph-warmup-steps", "0"),
    ),
    Case("layers", MOE, ROUTER, batch(8), graph_flags=("--cg-layers", "attn:0-1", "moe_router:1-")),
    Case(
        "checkpoint",
        MOE,
        ROUTER,
        (*batch(8), *("--save-interval", "6", "--save", "{directory}/{run}/checkpoints")),
    ),
    Case("latent-attention", MLA, PREPROCESS, batch(8)),
    Case("mamba", "mamba-hybrid-tiny", ("mamba", "attn"), batch(8), needs="mamba_ssm"),
]
