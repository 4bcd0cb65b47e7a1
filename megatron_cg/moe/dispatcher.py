"""Megatron's all-to-all dispatcher with token counts that stay on the device.

Megatron reads the counts on the host: to size what it receives, and for the experts' GEMMs. Here
what is received has a fixed number of rows, enough for any routing. So a graph can hold a whole MoE
layer without drop and pad.

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
from megatron_cg.moe.rows import order, reorder
from megatron_cg.upstream.symbols import Symbol

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
RELIES_ON = tuple(
    Symbol("megatron-core", f"{_DISPATCHER}.{name}", expected, fingerprints=fingerprints)
    for name, expected, fingerprints in (
        ("preprocess", "what counts tokens", ()),
        ("dispatch_preprocess", "what permutes tokens by expert", ()),
        ("combine_postprocess", "what restores the order of tokens", ()),
        ("_maybe_dtoh_and_synchronize", "what brings counts to the host", ("636489dc4100ff41",)),
        ("token_dispatch", "the exchange of tokens", ("ec63c5c6ffaa1a11",)),
        ("dispatch_postprocess", "what sorts rows by local expert", ("91ca0d31ed0d441c",)),
        ("combine_preprocess", "what restores their order", ("c4a06d4263d87d27",)),
        ("token_combine", "the exchange of results", ("35f14f0f8aacff3b",)),
    )
)


class DeviceCounts:
    """Rows of each local expert, for ``TEGroupedMLP``, which asks for them by ``tolist``."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts

    def tolist(self) -> torch.Tensor:
        """Int64 ``[local experts]`` on the device. Grouped GEMMs take it as a list."""
        return self._counts


class DeviceDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches without reading a count on the host. One expert tensor-parallel rank only."""

    tokens_per_expert: torch.Tensor | None
    _counts: torch.Tensor
    """Rows from each rank to each; see :func:`gather_counts`."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        return tokens_per_expert

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens and probabilities to their experts' ranks. A collective call.

        Returns:
            ``[rows, hidden]`` and ``[rows]``, with as many rows as any routing may need.
        """
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        sent = permutated_local_input_tokens.shape[0]
        if self.ep_size > 1:
            self._counts = gather_counts(self.input_splits, self.ep_group)
        rows = self._most_rows(sent)
        tokens = self._exchange(permutated_local_input_tokens, rows)
        if shared is not None:
            shared.linear_fc1_forward_and_act(tokens)
        return tokens, self._exchange(permuted_probs, rows)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, DeviceCounts, torch.Tensor]:
        """Sort rows by local expert."""
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        assert counts is not None
        if self.ep_size > 1 and self.num_local_experts > 1:
            of_chunks = self.num_global_tokens_per_local_expert
            rows = global_input_tokens.shape[0]
            self._order = order(of_chunks, rows), order(of_chunks.t(), rows)
            global_input_tokens = reorder(global_input_tokens, *self._order)
            global_probs = reorder(global_probs, *self._order)
        return global_input_tokens, DeviceCounts(counts), global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Undo the sorting of :meth:`dispatch_postprocess`."""
        if self.ep_size > 1 and self.num_local_experts > 1:
            forward, inverse = self._order
            del self._order
            hidden_states = reorder(hidden_states, inverse, forward)
        return hidden_states

    def token_combine(
        self, hidden_states: torch.Tensor, *_asynchronous: Any, **_unused: Any
    ) -> torch.Tensor:
        """Send results back to the ranks of their tokens. A collective call."""
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        results = self._exchange(hidden_states, self.num_out_tokens, back=True)
        if shared is not None:
            shared.linear_fc2_forward(results)
            shared.post_forward_comm()
        return results

    def _most_rows(self, sent: int) -> int:
        """Rows that this rank receives at most, when each rank sends ``sent``."""
        topk: int = self.config.moe_router_topk
        ranks: int = self.ep_size
        local: int = self.num_local_experts
        return ranks * (sent // topk) * min(topk, local)

    def _exchange(self, rows: torch.Tensor, received: int, *, back: bool = False) -> torch.Tensor:
        if self.ep_size == 1:
            return rows
        counts = self._counts.t().contiguous() if back else self._counts
        return exchange(rows, counts, received, self.ep_group)
