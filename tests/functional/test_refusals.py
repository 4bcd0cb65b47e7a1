"""What a refusal says of the released packages, seen on GPUs without this package's graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_cg.tools.align.command import GRAPH_FLAGS
from megatron_cg.tools.align.run import example_script, make_run
from megatron_cg.tools.align.token_data import TokenStream
from tests.functional.cases import DENSE, Case, batch
from tests.functional.conftest import TIMEOUT, plan_of, skip_without

SCOPES = ("attn", "mlp")
WEIGHTS = ("--fp8-param-gather",)

BLOCK_SCALED = Case(
    "block-scaled",
    DENSE,
    SCOPES,
    (
        *(*batch(8), "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
        *(*WEIGHTS, "--keep-fp8-transpose-cache", *GRAPH_FLAGS),
    ),
)


@pytest.mark.refuses("fp8-primary-weights-recipe")
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
