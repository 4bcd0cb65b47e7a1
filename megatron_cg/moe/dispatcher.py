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

from collections.abc import Iterable
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn

from megatron_cg.moe.row_bound import RowBound, clipped
from megatron_cg.moe.slots import Collective, Places, Transport, exchange, find_places, gaps_of
from megatron_cg.upstream.megatron import is_capturing
from megatron_cg.upstream.symbols import Symbol

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_SHARED = Symbol(
    "megatron.core.transformer.moe.shared_experts:SharedExpertState",
    "which stage of an overlapped shared expert is next",
    attributes=("IDLE",),
)
DISPATCHING = tuple(
    Symbol(f"{_DISPATCHER}.{name}", expected, fingerprints=fingerprints)
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
RELIES_ON = (_SHARED, *DISPATCHING)
KernelName = Literal["cublas", "torch"]
"""The values of ``--cg-grouped-gemm`` that are one kernel for all experts."""
_ROWS = 128
"""Quantized rows are a multiple of it in all, the empty ones at their end included."""


def largest_slot(sent: int, topk: int, local: int) -> int:
    """Rows that a rank sends to one with ``local`` experts at most, of ``sent`` rows."""
    return sent // topk * min(topk, local)


def shared_experts_idle(layers: Iterable[nn.Module]) -> None:
    """Let overlapped shared experts begin anew if a capture failed between two of their stages."""
    for module in (module for layer in layers for module in layer.modules()):
        if hasattr(module, "_overlap_state"):
            module._overlap_state = _SHARED.find().IDLE


class DeviceCounts(torch.Tensor):
    """Rows of each local expert, for ``TEGroupedMLP``, which asks for them by ``tolist``.

    megatron-core 0.20 asks tensors alone.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> torch.Tensor:  # type: ignore[override]
        """Int64 ``[local experts]`` on the device. Grouped GEMMs take it as a list."""
        return self.as_subclass(torch.Tensor)


class DeviceDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches without reading a count on the host while graphs are captured.

    Outside of captures it is Megatron's. One expert tensor-parallel rank only.
    """

    bound: RowBound | None = None
    """Bounds what a slot has room for; None is room for any routing."""
    transport: Transport | None = None
    """The way to other ranks; None is a :class:`Collective`."""
    gemm: KernelName = "torch"
    """What computes the experts."""
    multiple: int = 1
    """Each expert's rows begin at a multiple of it, and rows of zeros fill the gaps."""
    tokens_per_expert: torch.Tensor | None
    _sent: Places
    _received: Places
    """Of the current pass; one rank alone has sorted rows already."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if is_capturing():
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens and probabilities to their experts' ranks. A collective call.

        Returns:
            ``[rows, hidden]`` and ``[rows]``; in a capture sorted by local expert.
        """
        if not is_capturing():
            return super().token_dispatch(permutated_local_input_tokens, permuted_probs)  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        rows, probs = permutated_local_input_tokens, permuted_probs
        if self._moves:
            self._find_places(rows.shape[0])
            rows = self._exchange(rows, self._sent, self._received)
        if shared is not None:
            shared.linear_fc1_forward_and_act(rows)
        if self._moves:
            probs = self._exchange(probs, self._sent, self._received)
        return rows, probs

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """In a capture rows are sorted by local expert already."""
        if not is_capturing():
            return super().dispatch_postprocess(global_input_tokens, global_probs)  # type: ignore[no-any-return]
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        assert counts is not None
        return global_input_tokens, counts.as_subclass(DeviceCounts), global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """In a capture :meth:`token_combine` takes rows as they are."""
        if is_capturing():
            return hidden_states
        return super().combine_preprocess(hidden_states)  # type: ignore[no-any-return]

    def token_combine(
        self, hidden_states: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """Send results back to the ranks of their tokens. A collective call."""
        if not is_capturing():
            return super().token_combine(hidden_states, *others, **named)  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        results = hidden_states
        if self._moves:
            results = self._exchange(hidden_states, self._received, self._sent)
            del self._sent, self._received
        if shared is not None:
            shared.linear_fc2_forward(results)
            shared.post_forward_comm()
        return results

    @property
    def _moves(self) -> bool:
        """Whether rows do not lie as experts need them; those of one rank are sorted already."""
        return self.ep_size > 1 or self.multiple > 1

    def _exchange(self, rows: torch.Tensor, here: Places, there: Places) -> torch.Tensor:
        return exchange(rows, here, there, self.transport or Collective(self.ep_group))

    def _find_places(self, sent: int) -> None:
        slot = largest_slot(sent, self.config.moe_router_topk, self.num_local_experts)
        assert self.tokens_per_expert is not None
        received = self.tokens_per_expert.unsqueeze(0)
        if self.num_local_experts > 1:
            received = self.num_global_tokens_per_local_expert
        elif self.ep_size > 1:
            received = self.output_splits.unsqueeze(1)
        sends = self.input_splits if self.ep_size > 1 else received.sum(1)
        if self.bound is not None:
            slot = self.bound.slot(sent, self.ep_size, slot)
            self.bound.watch(sends)
            received = clipped(received, slot)
            self.tokens_per_expert = received.sum(0)
        rows, gaps = self.ep_size * slot, None
        if self.multiple > 1:
            gaps = gaps_of(self.tokens_per_expert, self.multiple)
            self.tokens_per_expert = self.tokens_per_expert + gaps
            rows += self.num_local_experts * self.multiple
            rows += -rows % _ROWS
        self._sent = find_places(sends.unsqueeze(1), slot, sent, whole=True)
        self._received = find_places(received, slot, rows, gaps=gaps)
