"""What refusals keep out, on GPUs: the run that is refused, with its rule left out, is not right.

A test here that fails because its run is identical to eager says that the refusal can go.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cg.tools.align.command import GRAPH_FLAGS
from megatron_cg.tools.align.outcome import Outcome
from megatron_cg.tools.align.run import example_script, make_run
from megatron_cg.tools.align.token_data import TokenStream
from tests.functional.cases import DENSE, Case, batch
from tests.functional.conftest import TIMEOUT, plan_of, skip_without
from tests.functional.without_rules import NO_EARLY_GATHER

SCRIPT = Path(__file__).with_name("without_rules.py")
SCOPES = ("attn", "mlp")
WEIGHTS = ("--fp8-param-gather",)
FP32_GRADIENTS = ("--megatron-fsdp-main-grads-dtype", "fp32")
OPTIMIZER_GRAPH = ("--optimizer-cuda-graph",)

OPTIMIZERS = {
    "as-it-is": (Case("optimizer", DENSE, SCOPES, batch(8), graph_flags=OPTIMIZER_GRAPH), ""),
    **{
        name: (
            Case(
                f"optimizer-{name}",
                DENSE,
                SCOPES,
                (*batch(8), *FP32_GRADIENTS),
                graph_flags=OPTIMIZER_GRAPH,
            ),
            more,
        )
        for name, more in (("fp32-gradients", ""), ("no-early-gather", f",{NO_EARLY_GATHER}"))
    },
}
BLOCK_SCALED = Case(
    "block-scaled",
    DENSE,
    SCOPES,
    (
        *(*batch(8), "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
        *(*WEIGHTS, "--keep-fp8-transpose-cache", *GRAPH_FLAGS),
    ),
)
REFUSED = {
    "optimizer-graph": OPTIMIZERS["as-it-is"][0],
    "fp8-primary-weights-recipe": BLOCK_SCALED,
}
"""A case of each rule here; Megatron itself accepts all of them."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_graph_does_not_train_as_eager(
    name: str, align: Callable[..., Outcome]
) -> None:
    """With gradients at fixed addresses too, and without the all-gather that its step begins."""
    case, more = OPTIMIZERS[name]
    outcome = align(case, script=SCRIPT, mutation=f"optimizer-graph{more}")
    assert outcome.comparison.status != "identical", outcome.comparison.reason


def test_block_scaled_weights_have_no_double_buffers(data: TokenStream, tmp_path: Path) -> None:
    """An eager run with the buffers that graphs need fails in Megatron-FSDP itself."""
    skip_without(BLOCK_SCALED.gpus)
    plan = plan_of(BLOCK_SCALED, tmp_path, example_script())
    run = make_run(plan, data, tmp_path, "eager")
    try:
        run.start(TIMEOUT)
        assert run.wait() != 0, run.text()[-3000:]
        assert "No buffer found for bucket_id" in run.text(), run.text()[-3000:]
    finally:
        run.stop()
