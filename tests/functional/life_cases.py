"""What the tests of a run's life train: saved, resumed, skipped, signalled, repeated, long."""

from dataclasses import replace

from tests.functional.cases import (
    CUBLAS_GEMM,
    DENSE,
    DEVICE_COUNTS,
    DROPOUT,
    EP2,
    EXPERTS,
    MOE,
    PEER_MEMORY,
    PEERS,
    ROUTER,
    TENSOR_PARALLEL,
    TENSORWISE,
    TORCH_GEMM,
    Case,
    batch,
)

SAVED = ("--save", "{directory}/{run}/checkpoints")


def _dense(name: str, *flags: str) -> Case:
    return Case(name, DENSE, ("attn", "mlp"), flags)


def _experts(name: str, *ours: str, flags: tuple[str, ...] = ()) -> Case:
    return Case(name, MOE, EXPERTS, (*batch(8), *EP2, *flags), graph_flags=ours)


_EVERY_SIX = (*SAVED, "--save-interval", "6")
_ROWS = ("--cg-moe-rows", "1")
_CASES = (
    _dense("dense", *batch(8), *DROPOUT),
    Case("moe", MOE, ROUTER, batch(8)),
    _experts("experts", *TORCH_GEMM),
    _experts("peers", *PEERS),
    replace(_experts("cublas", *CUBLAS_GEMM, *PEER_MEMORY), needs=DEVICE_COUNTS),
    replace(
        _experts("cublas-fp8", *CUBLAS_GEMM, *PEER_MEMORY, flags=TENSORWISE), needs=DEVICE_COUNTS
    ),
    _experts("bounded-peers", *PEERS, *_ROWS),
    _experts("bounded-meta", *TORCH_GEMM, *_ROWS, flags=("--init-model-with-meta-device",)),
    _experts("saved-experts", *TORCH_GEMM, flags=_EVERY_SIX),
    _dense("tensor-parallel", *batch(4), *TENSOR_PARALLEL),
    _dense("saved-dropout", *batch(8), *DROPOUT, *_EVERY_SIX),
    Case("skipped", MOE, ROUTER, (*batch(8), "--iterations-to-skip", "4", "7")),
    Case(
        "signal",
        MOE,
        ROUTER,
        (*batch(8), *SAVED, "--save-interval", "100", "--exit-signal-handler"),
        scenario="signal@7",
    ),
    replace(_dense("destroy", *batch(4), *TENSOR_PARALLEL), scenario="destroy@7"),
    Case(
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
)
LIFE = {case.name: case for case in _CASES}
UNUSED = Case("unused", MOE, ROUTER, batch(8), graph_flags=PEER_MEMORY)
"""Refused, since no graph holds experts."""


def resumed(case: Case, step: int) -> Case:
    """The run that goes on from what ``case`` saved after ``step`` steps."""
    flags = (*without(case.flags, "--save", "--save-interval"), "--ckpt-step", str(step))
    return replace(case, name=f"{case.name}-resumed", flags=(*flags, "--load", SAVED[1]))


def without(words: tuple[str, ...], *flags: str) -> tuple[str, ...]:
    """Leave out these flags, each with the one value that follows it."""
    dropped = {index + offset for index, w in enumerate(words) if w in flags for offset in (0, 1)}
    return tuple(word for index, word in enumerate(words) if index not in dropped)
