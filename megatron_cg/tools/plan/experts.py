"""Experts of a planned model, as ``--cg-grouped-gemm`` has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.moe.slots import Places
from megatron_cg.tools.cpu.fakes import replaced
from megatron_cg.tools.plan.trace import launched

EQUAL_UP_TO = 2_048
"""Terms of a sum; see "Bits" in ``docs/experts.md``."""

_KERNELS = 4
"""Of an exchange by peer memory: two barriers, the writes between them, and what reads the rows."""


@contextmanager
def experts_of(graph: GraphArguments) -> Iterator[None]:
    """Apply the flags of dropless experts to models that are built in the block.

    Weights on the meta device lie nowhere, so those of a layer are taken to lie in one bucket.
    """
    if graph.cg_grouped_gemm == "te":
        yield
        return
    from megatron_cg.moe import grouped_gemm, install
    from megatron_cg.moe.install import bound_rows, exchange_by_peers, use_device_counts
    from megatron_cg.moe.row_bound import RowBound

    with ExitStack() as undo:
        undo.callback(use_device_counts())
        if graph.cg_moe_exchange == "peer":
            undo.enter_context(replaced(install, "PeerMemory", PlannedPeerMemory))
            undo.callback(exchange_by_peers())
        if graph.cg_moe_rows is not None:
            undo.callback(bound_rows(RowBound(graph.cg_moe_rows)))
        undo.enter_context(replaced(grouped_gemm, "stacked", _in_one_bucket))
        yield


class PlannedPeerMemory:
    """What is exchanged by peer memory takes no memory of a pool but the rows that arrive."""

    def __init__(self, group: Any) -> None:
        self._sizes: dict[tuple[int, int], int] = {}

    @property
    def bytes(self) -> int:
        """As of :class:`~megatron_cg.moe.peer_memory.PeerMemory`."""
        return sum(self._sizes.values())

    def __call__(self, rows: torch.Tensor, here: Places, there: Places) -> torch.Tensor:
        """Rows that arrive, and how many bytes their slots have."""
        places, size = len(here.packed), rows[0].nbytes
        self._sizes[places, size] = (places + 1) * size
        launched(_KERNELS)
        return rows.new_empty((len(there.in_slots), *rows.shape[1:]))


def bits_note(args: Any) -> str:
    """With which eager run the bits of a model with torch's grouped GEMM are equal, and why."""
    ffn = args.moe_ffn_hidden_size
    # Output of fc1 and input gradient of fc2; output of fc2; input gradient of fc1.
    longest = max(args.hidden_size, ffn * (2 if args.swiglu else 1))
    always = "an eager run that has --cg-grouped-gemm torch too has equal bits"
    if longest <= EQUAL_UP_TO:
        return (
            f"the experts' longest sum has {longest:,} terms. Up to {EQUAL_UP_TO:,}, torch's "
            "grouped GEMM had the bits of Transformer Engine's default on H200s, but for small "
            f"experts (512 x 256) with 1,024 rows and more; and {always}."
        )
    return (
        f"the experts' longest sum has {longest:,} terms. Beyond {EQUAL_UP_TO:,}, cuBLAS may split "
        "it where an expert has few rows, so losses may differ from Transformer Engine's default "
        f"in the last bits; {always}."
    )


def _in_one_bucket(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0].expand(len(weights), *weights[0].shape)
