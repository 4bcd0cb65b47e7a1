"""Megatron's all-to-all dispatcher and experts with token counts that stay on the device.

Megatron reads the counts on the host: to size what it receives, and for the experts' GEMMs. Here
what is received has a fixed number of rows, enough for any routing. So a graph can hold a whole MoE
layer without drop and pad.

Note [Outside of captures]
    There the dispatcher is Megatron's, with its host reads, also where a captured region runs
    eagerly. So an eager pass costs what it costs without this package, and allows ranks with
    different numbers of tokens. Ranks never mix the two: a graph with an exchange is left by all or
    none.

Note [Order of rows]
    Experts get their rows in the order in which Megatron's dispatcher passes them: by expert, then
    by source rank, then by token. Weight gradients sum over rows, so another order would change
    their bits.

Note [Grouped GEMMs]
    Transformer Engine launches a GEMM for each expert, by counts on the host. Torch has one kernel
    for all experts, with counts on the device. So has cuBLASLt, by a setting of Transformer Engine.
    Their bits differ where cuBLASLt splits the sum of a GEMM with few rows and a long inner
    dimension. So both are used in all passes, captured or not: then passes agree.
    FP8 needs each expert's rows to be a multiple of some number. Megatron pads them by counts on
    the host; in a capture the dispatcher leaves rows free for it. In ``blockwise`` Megatron pads
    to 16 and cuBLASLt's kernel needs 128, so eager passes keep a GEMM for each expert there: all
    compared shapes had the same bits.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn

from megatron_cg.arguments.megatron import scope_names
from megatron_cg.arguments.schema import SCOPES
from megatron_cg.errors import ConfigurationError, Violation, say
from megatron_cg.experts import slots
from megatron_cg.experts.grouped_gemm import GroupedGemm, on_device
from megatron_cg.experts.row_bound import RowBound, clipped
from megatron_cg.experts.rules import ROW_MULTIPLES, lacks_device_counts
from megatron_cg.experts.stash import Stash
from megatron_cg.upstream import patch
from megatron_cg.upstream.megatron import is_capturing, relax_rules
from megatron_cg.upstream.symbols import Symbol, installed_version
from megatron_cg.upstream.te import fp8_recipe

_MOE = "megatron.core.transformer.moe"
_THEIRS = f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher"
DISPATCHING = tuple(
    Symbol(f"{_THEIRS}.{name}", expected, fingerprints=fingerprints)
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
_TE = "transformer_engine.pytorch.module.grouped_linear"
_GEMM = Symbol(
    f"{_TE}:_GroupedLinear.forward",
    "a grouped GEMM",
    parameters=tuple("ctx inp m_splits non_tensor_args out dgrad_out weights_and_biases".split()),
)
_LAYER_OF_TE = Symbol(
    f"{_TE}:GroupedLinear.forward",
    "what passes settings to the grouped GEMM",
    fingerprints=("2fdb193f2bdd91b2",),
)
_SUPPORTED = Symbol(
    f"{_TE}:is_module_grouped_tensor_path_supported",
    "whether one kernel computes all experts",
    parameters=("recipe", "dtype"),
)
_DISPATCHER = Symbol(f"{_MOE}.moe_layer:MoEAlltoAllTokenDispatcher", "a layer's dispatcher")
_PADS = Symbol(
    f"{_MOE}.experts:skip_routed_expert_padding",
    "whether experts leave the padding of their rows to others",
    parameters=("config",),
)
_COMPUTE = Symbol(f"{_MOE}.moe_layer:MoELayer.routed_experts_compute", "what computes rows")
RELIES_ON = (*DISPATCHING, _GEMM, _LAYER_OF_TE, _SUPPORTED, _DISPATCHER, _PADS, _COMPUTE)
KernelName = Literal["cublas", "torch"]
"""The values of ``--cg-grouped-gemm`` that are one kernel for all experts."""
_in_place: list[KernelName] = []
_lacking = cache(lacks_device_counts)
_ROWS = 128
"""Quantized rows are a multiple of it in all, the empty ones at their end included."""


def largest_slot(sent: int, topk: int, local: int) -> int:
    """Rows that a rank sends to one with ``local`` experts at most, of ``sent`` rows."""
    return sent // topk * min(topk, local)


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
    """Bounds what a slot, and all layers, have room for; None is room for any routing."""
    average: int
    """Rows that this rank sends, and receives on average."""
    transport: slots.Transport | None = None
    """The way to other ranks; None is :func:`by_all_to_all`."""
    gemm: KernelName = "torch"
    """What computes the experts."""
    multiple: int = 1
    """Each expert's rows begin at a multiple of it, and rows of zeros fill the gaps."""
    tokens_per_expert: torch.Tensor | None
    _sent: slots.Places
    _received: slots.Places
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
            if (stash := self.stash) is not None and torch.is_grad_enabled():
                stash.saw(self, len(global_input_tokens))
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
    def stash(self) -> Stash | None:
        """What keeps received rows; one rank alone has room for no others."""
        return self.bound.stash if self.bound is not None and self.ep_size > 1 else None

    @property
    def _moves(self) -> bool:
        """Whether rows do not lie as experts need them; those of one rank are sorted already."""
        return self.ep_size > 1 or self.multiple > 1

    def _exchange(
        self, rows: torch.Tensor, here: slots.Places, there: slots.Places
    ) -> torch.Tensor:
        transport = self.transport or partial(slots.by_all_to_all, self.ep_group)
        return slots.exchange(rows, here, there, transport)

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
            self.average = sent
            slot = self.bound.slot(sent, self.ep_size, slot)
        if self.bound is not None and self.bound.factor is not None:
            self.bound.watch(sends)
            received = clipped(received, slot)
            self.tokens_per_expert = received.sum(0)
        rows, gaps = self.ep_size * slot, None
        if self.multiple > 1:
            gaps = -self.tokens_per_expert % self.multiple
            self.tokens_per_expert = self.tokens_per_expert + gaps
            rows += self.num_local_experts * self.multiple
            rows += -rows % _ROWS
        self._sent = slots.find_places(sends.unsqueeze(1), slot, sent, whole=True)
        self._received = slots.find_places(received, slot, rows, gaps=gaps)


@patch.combined_undo
def use_device_counts(
    bound: RowBound | None = None, *, by_peers: bool = False, gemm: KernelName = "torch"
) -> Iterator[patch.Undo]:
    """Let models built from now on have experts whose token counts stay on the device.

    A model whose config captures whole MoE layers (``moe`` in ``cuda_graph_modules``) without drop
    and pad gets :class:`DeviceDispatcher`, and Megatron's rule against it does not apply.

    ``bound`` is of the rows that these layers exchange; whoever passes one has the steps repeated
    that exceed it. ``by_peers`` exchanges tokens by peer memory, which the layers of a group share.
    ``gemm`` computes the experts of any model; see Note [Grouped GEMMs].

    Raises:
        ConfigurationError: another kernel is in place already.
        UpstreamChangedError: Megatron or Transformer Engine lacks what this replaces, or a function
            that this replaces has another body. Nothing is changed by then.
    """
    theirs = _DISPATCHER.find()
    for symbol in (_LAYER_OF_TE, _GEMM):
        symbol.find()
    for other in {*_in_place} - {gemm}:
        why = f"{other} is in place in this process already"
        raise _refusal(gemm, why, "call megatron_cg.disable() before")
    # Where Transformer Engine is not installed, there are no settings to pass.
    passes = installed_version(_LAYER_OF_TE.distribution)
    for symbol in (*((_LAYER_OF_TE,) if passes else ()), *DISPATCHING):
        symbol.require_known_body()
    # Not by name: after destroy_process_group(), new groups have the names of earlier ones.
    of_group = cache(slots.PeerMemory)

    def make_dispatcher(*args: Any, **named: Any) -> Any:
        config = named.get("config")
        if config is None or not captures_experts(config):
            return theirs(*args, **named)
        made = DeviceDispatcher(*args, **named)
        made.gemm = gemm
        made.multiple = ROW_MULTIPLES.get(config.fp8_recipe, 1) if config.fp8 else 1
        if bound is not None:
            bound.place()
            made.bound = bound
        if by_peers and made.ep_size > 1:
            made.transport = of_group(made.ep_group)
        return made

    if gemm == "torch":
        yield patch.set_attribute(sys.modules[_TE], "_GroupedLinear", GroupedGemm)
    else:
        yield patch.run_instead(_LAYER_OF_TE, _by_one_kernel)
        yield patch.run_instead(_PADS, _skips_padding)
    _in_place.append(gemm)
    yield partial(_in_place.remove, gemm)
    yield patch.replace_function(*_DISPATCHER.place(), make_dispatcher)
    if bound is not None and bound.stash is not None:
        yield patch.run_instead(_COMPUTE, _keeping_rows)
    yield allow_dropless_experts()


def _keeping_rows(compute: Callable[..., Any], layer: Any, *args: Any, **named: Any) -> Any:
    """``MoELayer.routed_experts_compute``, which saves used rows alone; see ``stash.py``."""
    dispatcher = layer.token_dispatcher
    stash = dispatcher.stash if isinstance(dispatcher, DeviceDispatcher) else None
    if stash is None or dispatcher.tokens_per_expert is None or not is_capturing():
        return compute(layer, *args, **named)
    counts, rows = dispatcher.tokens_per_expert, len(dispatcher._received.in_slots)
    with stash.keeping(layer.experts, counts, rows, dispatcher):
        return compute(layer, *args, **named)


def _by_one_kernel(
    forward: Callable[..., Any], layer: Any, inp: Any, m_splits: Any, *rest: Any, **named: Any
) -> Any:
    """``GroupedLinear.forward`` by cuBLASLt's kernel; see Note [Grouped GEMMs]."""
    recipe, counts = fp8_recipe(), m_splits
    if inp.is_cuda:
        _refuse_other(recipe, inp.dtype)
    if not getattr(counts, "is_cuda", False):
        if recipe is not None and recipe.float8_block_scaling():
            return forward(layer, inp, m_splits, *rest, **named)
        counts = torch.as_tensor(counts, dtype=torch.int64, device="cpu")
        counts = on_device(counts, inp.device)
    before, layer.use_grouped_tensor = layer.use_grouped_tensor, True
    try:
        return forward(layer, inp, counts, *rest, **named)
    finally:
        layer.use_grouped_tensor = before


def _refuse_other(recipe: Any, dtype: torch.dtype) -> None:
    """Raise ConfigurationError where Transformer Engine would compute otherwise without a word."""
    lacks = _lacking()
    if not lacks and not _SUPPORTED.find()(recipe, dtype):
        kind = "" if recipe is None else f" and {type(recipe).__name__}"
        lacks = f"Transformer Engine has no such kernel for {dtype}{kind}"
    if lacks:
        remedy = say("{type:--cg-grouped-gemm torch} (BF16) or {flag:--cg-grouped-gemm te}")
        raise _refusal("cublas", lacks, remedy)


def _refusal(gemm: str, why: str, remedy: str) -> ConfigurationError:
    found = say("{flag:--cg-grouped-gemm {gemm}}", gemm=gemm)
    return ConfigurationError([Violation("grouped-gemm", found, why, remedy)])


def _skips_padding(skips: Callable[[Any], bool], config: Any) -> bool:
    """Whether the dispatcher pads an expert's rows, or Megatron's ``skips`` says so."""
    return (is_capturing() and captures_experts(config)) or skips(config)


@dataclass(frozen=True)
class ModelExperts:
    """What the dropless experts of one model were built with, all alike.

    ``bound`` is None if graphs have room for all rows, ``peers`` if tokens go by collectives.
    """

    gemm: KernelName
    bound: RowBound | None
    peers: slots.PeerMemory | None

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of GraphArguments that they were built with."""
        return {
            "cg_grouped_gemm": self.gemm,
            "cg_moe_exchange": "nccl" if self.peers is None else "peer",
            "cg_moe_rows": self.bound and self.bound.factor,
            "cg_moe_stash": self.bound and self.bound.stash_factor,
        }

    def expect(self, layers: Iterable[nn.Module]) -> None:
        """Size the memory of the next capture for these layers, by what was received eagerly."""
        if self.bound is not None and self.bound.stash is not None:
            modules = (module for layer in layers for module in layer.modules())
            found = [getattr(module, "token_dispatcher", None) for module in modules]
            self.bound.stash.expect([one for one in found if isinstance(one, DeviceDispatcher)])

    def hold(self) -> patch.Undo:
        """Keep the memory that graphs of a capture address; returns the undo, for their end."""
        return patch.combine_undos(one.hold() for one in self._memories)

    def forget(self) -> None:
        """Free that of a capture which failed on all ranks."""
        for one in self._memories:
            one.forget()

    @property
    def _memories(self) -> list[slots.PeerMemory | Stash]:
        stash = None if self.bound is None else self.bound.stash
        return [one for one in (self.peers, stash) if one is not None]


def experts_of(model: nn.Module) -> ModelExperts | None:
    """What the dropless experts of ``model`` were built with; None if it has none."""
    for module in model.modules():
        made = getattr(module, "token_dispatcher", None)
        if isinstance(made, DeviceDispatcher):
            peers = made.transport if isinstance(made.transport, slots.PeerMemory) else None
            return ModelExperts(made.gemm, made.bound, peers)
    return None


def captures_experts(config: Any) -> bool:
    """Whether graphs of this model hold dropless experts; Megatron may not have read its config."""
    scope, capacity = config.cuda_graph_scope, config.moe_expert_capacity_factor
    if config.cuda_graph_impl != "transformer_engine" or not config.num_moe_experts:
        return False
    given = scope_names(config.cuda_graph_modules if scope is None else scope)
    return (
        ("moe" in given or not set(SCOPES) & set(given))
        and (capacity is None or capacity < 0)
        and not config.moe_pad_expert_input_to_capacity
    )


def allow_dropless_experts() -> patch.Undo:
    """Let configs that are made from now on capture whole MoE layers; returns the undo."""
    # One rule demands drop and pad of whole MoE layers.
    return relax_rules(
        captures_experts,
        moe_expert_capacity_factor=(1.0, None),
        moe_pad_expert_input_to_capacity=(True, False),
    )
