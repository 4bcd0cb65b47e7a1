"""Batches whose sequences are packs of shorter ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any

import torch

from tests.functional.tampering.places import wrap

STARTS = ((0.0, 0.3), (0.0,), (0.0, 0.1, 0.15, 0.7), (0.0, 0.5))
"""Where the sequences of a pack begin, as parts of its length; each forward pass takes the next.

Data-parallel ranks begin with different ones.
"""


def boundaries(starts: Sequence[int], device: torch.device | str) -> Any:
    """Megatron's object of a pack: where its sequences begin, and the end of the last."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor(starts, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(starts))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def pack() -> None:
    """Pass Megatron's model the boundaries of another pack in each forward pass, of both runs.

    The micro-batch size has to be 1.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.parallel_state import get_data_parallel_rank

    numbers = count()

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            length, number = tokens.shape[1], next(numbers)
            parts = STARTS[(number + get_data_parallel_rank()) % len(STARTS)]
            starts = [int(part * length) for part in parts] + [length]
            if not number:
                print(f"packed: {starts}")
            given = boundaries(starts, tokens.device)
            return old(self, tokens, *args, **kwargs, packed_seq_params=given)

        return forward

    # Around what --cg-pack-sequences puts around forward.
    wrap(GPTModel, "__call__", make)
