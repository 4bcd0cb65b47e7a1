"""What the tests of a run's life train: saved, resumed, skipped, signalled, repeated, long."""

from __future__ import annotations

from dataclasses import replace

from tests.functional.cases import (
    DENSE,
    DROPOUT,
    EP2,
    EXPERTS,
    MOE,
    PEERS,
    ROUTER,
    TENSOR_PARALLEL,
    TORCH_GEMM,
    Case,
    batch,
)

SAVED = ("--save", "{directory}/{run}/checkpoints")
LIFE = {
    "dense": Case("dense", DENSE, ("attn", "mlp"), (*batch(8), *DROPOUT)),
    "moe": Case("moe", MOE, ROUTER, batch(8)),
    "experts": Case("experts", MOE, EXPERTS, (*batch(8), *EP2), graph_flags=TORCH_GEMM),
    "peers": Case("peers", MOE, EXPERTS, (*batch(8), *EP2), graph_flags=PEERS),
    "bounded-peers": Case(
        "bounded-peers",
        MOE,
        EXPERTS,
        (*batch(8), *EP2),
        graph_flags=(*PEERS, "--cg-moe-rows", "1"),
    ),
    "bounded-meta": Case(
        "bounded-meta",
        MOE,
        EXPERTS,
        (*batch(8), *EP2, "--init-model-with-meta-device"),
        graph_flags=(*TORCH_GEMM, "--cg-moe-rows", "1"),
    ),
    "saved-experts": Case(
        "saved-experts",
        MOE,
        EXPERTS,
        (*batch(8), *EP2, *SAVED, "--save-interval", "6"),
        graph_flags=TORCH_GEMM,
    ),
    "tensor-parallel": Case(
        "tensor-parallel", DENSE, ("attn", "mlp"), (*batch(4), *TENSOR_PARALLEL)
    ),
    "saved-dropout": Case(
        "saved-dropout",
        DENSE,
        ("attn", "mlp"),
        (*batch(8), *DROPOUT, *SAVED, "--save-interval", "6"),
    ),
    "skipped": Case("skipped", MOE, ROUTER, (*batch(8), "--iterations-to-skip", "4", "7")),
    "signal": Case(
        "signal",
        MOE,
        ROUTER,
        (*batch(8), *SAVED, "--save-interval", "100", "--exit-signal-handler"),
        scenario="signal@7",
    ),
    "destroy": Case(
        "destroy",
        DENSE,
        ("attn", "mlp"),
        (*batch(4), *TENSOR_PARALLEL),
        scenario="destroy@7",
    ),
    "long": Case(
        "long",
        MOE,
        ROUTER,
        (
            *(*batch(4), "--num-layers", "2"),
            *("--expert-model-parallel-size", "2", "--log-interval", "100"),
            *("--eval-interval", "1000", "--eval-iters", "2", "--split", "90,5,5"),
            *(*SAVED, "--save-interval", "2500"),
        ),
        steps=10_000,
    ),
}
UNUSED = Case("unused", MOE, ROUTER, batch(8), graph_flags=("--cg-moe-exchange", "peer"))
"""Refused, since no graph holds experts."""


def resumed(case: Case, step: int) -> Case:
    """The run that goes on from what ``case`` saved after ``step`` steps."""
    flags = (*without(case.flags, "--save", "--save-interval"), "--ckpt-step", str(step))
    return replace(case, name=f"{case.name}-resumed", flags=(*flags, "--load", SAVED[1]))


def without(words: tuple[str, ...], *flags: str) -> tuple[str, ...]:
    """Leave out these flags, each with the one value that follows it."""
    dropped = {index + offset for index, w in enumerate(words) if w in flags for offset in (0, 1)}
    return tuple(word for index, word in enumerate(words) if index not in dropped)
