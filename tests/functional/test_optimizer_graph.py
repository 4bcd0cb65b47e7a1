"""A graph of the optimizer's step beside graphs of layers, against eager with the same Adam."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_cg.tools.align.outcome import Outcome
from tests.functional.cases import (
    DENSE,
    EP2,
    EVALUATED,
    EXPERTS,
    MOE,
    ROUTER,
    TORCH_GEMM,
    Case,
    batch,
)
from tests.functional.conftest import skip_without

SCRIPT = Path(__file__).with_name("tampered.py")
FLAGS = ("--megatron-fsdp-main-grads-dtype", "fp32")
STEP = ("--optimizer-cuda-graph",)
CASES = [
    Case(
        f"optimizer-graph-{name}",
        preset,
        scopes,
        (*batch(8), *FLAGS, *flags),
        graph_flags=(*STEP, *of_graphs),
    )
    for name, preset, scopes, flags, of_graphs in (
        ("dense", DENSE, ("attn", "mlp"), EVALUATED, ()),
        ("no-fast-path", DENSE, ("attn", "mlp"), (), ("--cg-no-fsdp-fast-path",)),
        (
            "zero2",
            DENSE,
            ("attn", "mlp"),
            ("--data-parallel-sharding-strategy", "optim_grads"),
            (),
        ),
        ("moe", MOE, ROUTER, EP2, ()),
        ("experts", MOE, EXPERTS, EP2, TORCH_GEMM),
    )
]
CAPTURES = "Capture CUDA graph for optimizer"
EAGERLY = "the optimizer's step runs eagerly"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_norms_and_shards_are_those_of_eager(
    case: Case, align: Callable[..., Outcome], log: Callable[..., str]
) -> None:
    outcome = align(case)
    assert outcome.comparison.status == "identical", outcome.comparison.reason + outcome.log_tail
    printed = log(case)
    assert CAPTURES in printed
    assert EAGERLY not in printed


def test_the_step_is_captured_again_with_the_layers(
    align: Callable[..., Outcome], log: Callable[..., str]
) -> None:
    case = CASES[3]
    outcome = align(case, script=SCRIPT, mutation="recapture@6,9")
    assert outcome.comparison.status == "identical", outcome.comparison.reason + outcome.log_tail
    printed = log(case)
    ranks = case.gpus
    assert printed.count(CAPTURES) == 3 * ranks
    assert EAGERLY not in printed


def test_adam_rounds_elsewhere_when_it_is_capturable() -> None:
    """So an eager run without --cg-capturable-adam is no reference."""
    skip_without(1)
    from transformer_engine.pytorch.optimizers import FusedAdam

    def trained(capturable: bool) -> list[torch.Tensor]:
        random = torch.Generator("cuda").manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(1 << 16, device="cuda", generator=random))
        optimizer = FusedAdam([weight], lr=1e-3, capturable=capturable)
        steps = []
        for _ in range(3):
            weight.grad = torch.randn(1 << 16, device="cuda", generator=random)
            optimizer.step()
            steps.append(weight.detach().clone())
        return steps

    ordinary, again, capturable = trained(False), trained(False), trained(True)
    assert all(map(torch.equal, ordinary, again))
    assert not any(map(torch.equal, ordinary, capturable))
    torch.testing.assert_close(capturable, ordinary)
