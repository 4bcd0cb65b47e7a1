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

from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_cg.moe.slots import move, places
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


class DeviceCounts:
    """Rows of each local expert, for ``TEGroupedMLP``, which asks for them by ``tolist``."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts

    def tolist(self) -> torch.Tensor:
        """Int64 ``[local experts]`` on the device. Grouped GEMMs take it as a list."""
        return self._counts


class _Places(NamedTuple):
    """The results of :func:`places` for the rows that this rank sends and for those it receives."""

    sent: tuple[torch.Tensor, torch.Tensor]
    received: tuple[torch.Tensor, torch.Tensor]


class DeviceDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches without reading a count on the host while graphs are captured.

    Outside of captures it is Megatron's. One expert tensor-parallel rank only.
    """

    tokens_per_expert: torch.Tensor | None
    _places: _Places | None = None
    """Of the layer's pass; None with one expert-parallel rank, whose rows are sorted already."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if is_capturing():
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens and probabilities to their experts' ranks. A collective call.

        Returns:
            ``[rows, hidden]`` and ``[rows]``; in a capture in slots, see Note [Slots].
        """
        if not is_capturing():
            sent: Any = super().token_dispatch(permutated_local_input_tokens, permuted_probs)
            return sent  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        if self.ep_size > 1:
            self._places = self._find_places(permutated_local_input_tokens.shape[0])
        tokens = self._send(permutated_local_input_tokens)
        if shared is not None:
            shared.linear_fc1_forward_and_act(tokens)
        return tokens, self._send(permuted_probs)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Sort rows by local expert."""
        if not is_capturing():
            processed: Any = super().dispatch_postprocess(global_input_tokens, global_probs)
            return processed  # type: ignore[no-any-return]
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        assert counts is not None
        if self._places is not None:
            global_input_tokens = move(global_input_tokens, *self._places.received)
            global_probs = move(global_probs, *self._places.received)
        return global_input_tokens, DeviceCounts(counts), global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Undo the sorting of :meth:`dispatch_postprocess`."""
        if not is_capturing():
            restored: Any = super().combine_preprocess(hidden_states)
            return restored  # type: ignore[no-any-return]
        if self._places is None:
            return hidden_states
        return move(hidden_states, *reversed(self._places.received))

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
        results = hidden_states
        if self._places is not None:
            results = move(all_to_all(self.ep_group, results), *self._places.sent)
            self._places = None
        if shared is not None:
            shared.linear_fc2_forward(results)
            shared.post_forward_comm()
        return results

    def _send(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank to the slots of all ranks; a collective call."""
        if self._places is None:
            return rows
        sent: torch.Tensor = all_to_all(self.ep_group, move(rows, *reversed(self._places.sent)))
        return sent

    def _find_places(self, sent: int) -> _Places:
        """Places in slots that have room for any routing of ``sent`` rows."""
        topk: int = self.config.moe_router_topk
        slot = sent // topk * min(topk, self.num_local_experts)
        received = self.output_splits.unsqueeze(1)
        if self.num_local_experts > 1:
            received = self.num_global_tokens_per_local_expert
        return _Places(
            places(self.input_splits.unsqueeze(1), slot, sent),
            places(received, slot, self.ep_size * slot),
        )
