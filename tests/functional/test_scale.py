"""Four and eight ranks: each way of splitting a model over them trains as eager, bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_cg.tools.align.compare import Outcome
from tests.functional.cases import (
    CAPACITY,
    DENSE,
    EXPERTS,
    HSDP,
    MOE,
    ONE_EACH,
    PEER_MEMORY,
    TENSOR_PARALLEL,
    TORCH_GEMM,
    Case,
    batch,
)
from tests.functional.outcomes import assert_identical, assert_left_eager

EP = "--expert-model-parallel-size"
FULLY = (*HSDP, "--outer-dp-sharding-strategy", "optim")
"""The optimizer's state is sharded over all ranks, weights over half of them."""
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ep4": (4, (*batch(16), EP, "4")),
    "tp2-fsdp2": (4, (*batch(8), *TENSOR_PARALLEL, *ONE_EACH)),
    "cp2-fsdp2": (4, (*batch(16), "--context-parallel-size", "2")),
    "hsdp-four": (4, (*batch(16), *HSDP)),
    "hfsdp-four": (4, (*batch(16), *FULLY)),
    "ep8": (8, (*batch(32), EP, "8")),
    "tp2-ep4": (8, (*batch(16), *TENSOR_PARALLEL, EP, "4", *ONE_EACH)),
    "tp2-fsdp4": (8, (*batch(16), *TENSOR_PARALLEL, *ONE_EACH)),
    "cp2-fsdp4": (8, (*batch(16), "--context-parallel-size", "2")),
    "hsdp": (8, (*batch(32), *HSDP)),
    "hfsdp": (8, (*batch(32), *FULLY)),
}
"""How many ranks, and Megatron's flags."""
SAME_GEMM = ("ep4", "ep8")
"""Where eager runs with Transformer Engine's grouped GEMM and with torch's differed, before any
capture. Both runs have torch's there."""
FOUR = (*LAYOUTS["ep4"][1], *TORCH_GEMM)


def _cases() -> list[Case]:
    """Dense models where no expert is split, and whole MoE layers."""
    found = []
    for name, (gpus, flags) in LAYOUTS.items():
        if EP not in flags:
            dense = flags if ONE_EACH[0] not in flags else flags[: -len(ONE_EACH)]
            found.append(Case(f"{name}-dense", DENSE, ("attn", "mlp"), dense, gpus))
        both = (*flags, *TORCH_GEMM) if name in SAME_GEMM else flags
        found.append(Case(f"{name}-experts", MOE, EXPERTS, both, gpus, graph_flags=TORCH_GEMM))
    for name, more in {"peers": (), "peers-rows": ("--cg-moe-rows", "1")}.items():
        found.append(Case(f"ep4-{name}", MOE, EXPERTS, FOUR, 4, graph_flags=(*PEER_MEMORY, *more)))
    split = (*TENSOR_PARALLEL, EP, "2", "--expert-tensor-parallel-size", "2")
    return [*found, Case("ep2-etp2-capacity", MOE, EXPERTS, (*batch(4), *split, *CAPACITY), 4)]


CASES = _cases()
EIGHT = replace(
    next(case for case in CASES if case.name == "hsdp-dense"),
    graph_flags=("--cg-on-failure", "eager"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_norms_and_shards_are_bit_equal(case: Case, align: Callable[..., Outcome]) -> None:
    assert_identical(align(case), case.steps)


@pytest.mark.parametrize("stage", ["memory", "capture-backward", "install"])
def test_a_capture_that_fails_on_one_rank_of_eight_leaves_all_eager(
    stage: str, align: Callable[..., Outcome]
) -> None:
    case = replace(EIGHT, name=f"one-of-eight-{stage}")
    outcome = align(case, mutation=f"fail@{stage}@5")
    assert_left_eager(outcome, case.steps)
    assert outcome.graphed is not None and len(outcome.graphed) == case.gpus
