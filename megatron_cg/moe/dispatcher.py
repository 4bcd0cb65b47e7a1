"""Megatron's all-to-all dispatcher with token counts that stay on the device.

Megatron reads the counts on the host: to size what it receives, and for the experts' GEMMs. Here
what is received has a fixed number of rows, enough for any routing. So a graph can hold a whole MoE
layer without drop and pad.

Note [Outside of captures]
    There the dispatcher is Megatron's, with its host reads, also where a captured region runs
    eagerly. So an eager pass costs what it costs without this package, takes no rows for the worst
    case, and allows ranks with different numbers of tokens. Ranks never mix the two: a graph with
    collectives is left by all of them or by none.

Note [Order of rows]
    Experts get their rows in the order in which Megatron's dispatcher passes them: by expert, then
    by source rank, then by token. Weight gradients sum over rows, so another order would change
    their bits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_cg.moe.exchange import exchange, gather_counts
from megatron_cg.moe.row_bound import RowBound
from megatron_cg.moe.rows import order, reorder
from megatron_cg.replay.region import is_capturing
from megatron_cg.upstream.symbols import Symbol

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
RELIES_ON = tuple(
    Symbol("megatron-core", f"{_DISPATCHER}.{name}", expected, fingerprints=fingerprints)
    for name, expected, fingerprints in (
        ("preprocess", "what counts tokens", ()),
        ("dispatch_preprocess", "what permutes tokens by expert", ()),
        ("combine_postprocess", "what restores the order of tokens", ()),
        ("_maybe_dtoh_and_synchronize", "what reads counts", ("636489dc4100ff41",)),
        ("token_dispatch", "the exchange of tokens", ("ec63c5c6ffaa1a11",)),
        ("dispatch_postprocess", "what sorts rows by local expert", ("91ca0d31ed0d441c",)),
        ("combine_preprocess", "what restores their order", ("c4a06d4263d87d27",)),
        ("token_combine", "the exchange of results", ("35f14f0f8aacff3b",)),
    )
)


def most_rows(sent: int, topk: int, ranks: int, local: int) -> int:
    """Rows that a rank with ``local`` experts receives at most, when each rank sends ``sent``."""
    return ranks * (sent // topk) * min(topk, local)


class DeviceCounts:
    """Rows of each local expert, for ``TEGroupedMLP``, which asks for them by ``tolist``."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts

    def tolist(self) -> torch.Tensor:
        """Int64 ``[local experts]`` on the device. Grouped GEMMs take it as a list."""
        return self._counts


class DeviceDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches without reading a count on the host while graphs are captured.

    Outside of captures it is Megatron's. One expert tensor-parallel rank only.
    """

    bound: RowBound | None = None
    """Bounds what a capture has room for; None is room for any routing."""
    tokens_per_expert: torch.Tensor | None
    _counts: torch.Tensor
    """Rows from each rank to each; see :func:`gather_counts`."""
    _order: tuple[torch.Tensor, torch.Tensor] | None
    """How rows are sorted by local expert, and the inverse; None if they are sorted already."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if is_capturing():
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens and probabilities to their experts' ranks. A collective call.

        Returns:
            ``[rows, hidden]`` and ``[rows]``; in a capture with as many rows as there is room for.
        """
        if not is_capturing():
            sent: Any = super().token_dispatch(permutated_local_input_tokens, permuted_probs)
            return sent  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        rows = permutated_local_input_tokens.shape[0]
        if self.ep_size > 1:
            self._counts = gather_counts(self.input_splits, self.ep_group)
            rows = self._room(rows)
        tokens = self._exchange(permutated_local_input_tokens, rows)
        if shared is not None:
            shared.linear_fc1_forward_and_act(tokens)
        return tokens, self._exchange(permuted_probs, rows)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Sort rows by local expert."""
        if not is_capturing():
            processed: Any = super().dispatch_postprocess(global_input_tokens, global_probs)
            return processed  # type: ignore[no-any-return]
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        assert counts is not None
        self._order = None
        if self.ep_size > 1 and self.num_local_experts > 1:
            of_chunks = self.num_global_tokens_per_local_expert
            rows = global_input_tokens.shape[0]
            self._order = order(of_chunks, rows), order(of_chunks.t(), rows)
            global_input_tokens = reorder(global_input_tokens, *self._order)
            global_probs = reorder(global_probs, *self._order)
        return global_input_tokens, DeviceCounts(counts), global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Undo the sorting of :meth:`dispatch_postprocess`."""
        if not is_capturing():
            restored: Any = super().combine_preprocess(hidden_states)
            return restored  # type: ignore[no-any-return]
        if self._order is None:
            return hidden_states
        (forward, inverse), self._order = self._order, None
        return reorder(hidden_states, inverse, forward)

    def token_combine(
        self, hidden_states: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """Send results back to the ranks of their tokens. A collective call."""
        if not is_capturing():
            combined: Any = super().token_combine(hidden_states, *others, **named)
            return combined  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        results = self._exchange(hidden_states, self.num_out_tokens, back=True)
        if shared is not None:
            shared.linear_fc2_forward(results)
            shared.post_forward_comm()
        return results

    def _room(self, sent: int) -> int:
        """Rows that this rank has room for, when each rank sends ``sent``.

        If a rank receives more, nothing is exchanged; see Note [Beyond the bound] in
        ``row_bound.py``.
        """
        worst = most_rows(sent, self.config.moe_router_topk, self.ep_size, self.num_local_experts)
        rows = worst if self.bound is None else self.bound.rows(sent, worst)
        if self.bound is not None and rows < worst:
            fits = self.bound.fits(self._counts, rows)
            self._counts = self._counts * fits
            assert self.tokens_per_expert is not None
            self.tokens_per_expert = self.tokens_per_expert * fits
            if self.num_local_experts > 1:
                self.num_global_tokens_per_local_expert = (
                    self.num_global_tokens_per_local_expert * fits
                )
        return rows

    def _exchange(self, rows: torch.Tensor, received: int, *, back: bool = False) -> torch.Tensor:
        if self.ep_size == 1:
            return rows
        counts = self._counts.t().contiguous() if back else self._counts
        return exchange(rows, counts, received, self.ep_group)
