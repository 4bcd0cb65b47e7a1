"""Experts of a planned model, as ``--cg-grouped-gemm`` has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.tools.cpu.fakes import replaced


@contextmanager
def experts_of(graph: GraphArguments) -> Iterator[None]:
    """Apply ``--cg-grouped-gemm`` and ``--cg-moe-rows`` to models that are built in the block.

    Weights on the meta device lie nowhere, so those of a layer are taken to lie in one bucket.
    """
    if graph.cg_grouped_gemm == "te":
        yield
        return
    from megatron_cg.moe import grouped_gemm
    from megatron_cg.moe.install import bound_rows, use_device_counts
    from megatron_cg.moe.row_bound import RowBound

    with ExitStack() as undo:
        undo.callback(use_device_counts())
        if graph.cg_moe_rows is not None:
            undo.callback(bound_rows(RowBound(graph.cg_moe_rows)))
        undo.enter_context(replaced(grouped_gemm, "as_one", _in_one_bucket))
        yield


def _in_one_bucket(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0].expand(len(weights), *weights[0].shape)
