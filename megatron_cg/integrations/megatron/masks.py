"""No attention mask for a layer that gets none, neither in its graph nor for a replay.

Note [A mask that nobody reads]
    With ``--no-create-attention-mask-in-dataloader`` a layer is called with None, because its
    attention is configured as causal. Megatron still captures it with a mask of (1, 1, s, s) bytes
    for each layer: 16 MiB at a sequence length of 4,096 and 1 GiB at 32,768
    (``TransformerLayer.get_layer_static_inputs``). For every replay it makes another mask, all
    zeros (``_get_te_cuda_graph_replay_args``), and TE copies it into the first one. TE's causal
    attention reads neither. An attention that does read its mask sees the zeros as "mask nothing"
    and silently trains something else than the eager layer. A graph that is captured without the
    keyword computes what the eager layer computes for None.

Note [A wrong guess]
    If a mask is passed later, the guard sees an input that the graph does not have and runs that
    pass eagerly, with the mask. If a graph has a mask and the layer is called with None, as after a
    capture without steps before it, Megatron's zeros are not made for an attention that may read
    them. The guard then misses an input, and that pass runs eagerly, with None. So a wrong guess
    costs time but never changes a result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_cg.capture.observer import StaticInputs
from megatron_cg.integrations.megatron.megatron_unit import HIDDEN
from megatron_cg.upstream.patch import Undo, combine_undos, replace_function
from megatron_cg.upstream.symbols import Symbol

MASK = "attention_mask"

_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_SAMPLES = Symbol(
    f"{_LAYER}.get_layer_static_inputs",
    "where Megatron makes attention masks for captures",
    fingerprints=("79b27aa0a43a2949",),
)
_REPLAY_ARGS = Symbol(
    f"{_LAYER}._get_te_cuda_graph_replay_args", "where Megatron makes attention masks for replays"
)
_ATTENTION = Symbol(
    "megatron.core.transformer.attention:Attention",
    "an attention that is called with masks",
    attributes=("core_attention", "attn_mask_type"),
)
_OF_TE = "megatron.core.extensions.transformer_engine"
"""The module of Megatron's class around Transformer Engine's attention."""
RELIES_ON = (_SAMPLES, _REPLAY_ARGS, _ATTENTION)


class ObservedInputs(StaticInputs):
    """Static inputs, plus the keywords that were None in every call of all whole steps."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        self._none: set[tuple[nn.Module, str]] = set()
        self._given: set[tuple[nn.Module, str]] = set()
        self._differentiated: set[nn.Module] = set()

    def is_never_given(self, layer: nn.Module, name: str) -> bool:
        """Whether a layer was called with that keyword and its value was always None."""
        return (layer, name) in self._none - self._given

    def never_differentiated(self, layer: nn.Module) -> bool:
        """Whether a layer was called, and its hidden states never needed a gradient."""
        return (layer, HIDDEN) in self._given and layer not in self._differentiated

    def _look(self, layer: nn.Module, inputs: Mapping[str, Any]) -> None:
        super()._look(layer, inputs)
        hidden = inputs.get(HIDDEN)
        if hidden is not None and hidden.requires_grad:
            self._differentiated.add(layer)
        for name, value in inputs.items():
            (self._none if value is None else self._given).add((layer, name))


def without_unused_masks(layers: Sequence[nn.Module], inputs: ObservedInputs) -> Undo:
    """Capture layers without a mask that they never received, and replay with no made-up one.

    Call it before sample inputs are made, and undo it after the graphs are deleted.
    """

    def changes() -> Iterator[Undo]:
        for layer in layers:
            if not isinstance(layer, TransformerLayer):
                continue
            never_given = inputs.is_never_given(layer, MASK)
            if never_given:
                samples = partial(_samples, layer, layer.get_layer_static_inputs)
                yield replace_function(layer, "get_layer_static_inputs", samples)
            if never_given or _may_read(layer.self_attention):
                replay = partial(_replay_args, layer._get_te_cuda_graph_replay_args)
                yield replace_function(layer, "_get_te_cuda_graph_replay_args", replay)

    return combine_undos(changes())


def _may_read(attention: Any) -> bool:
    """Whether it may read a mask; Transformer Engine's does not where it is causal."""
    if not isinstance(attention, Attention):
        return False
    causal = attention.attn_mask_type in (AttnMaskType.causal, AttnMaskType.no_mask)
    return not (causal and type(attention.core_attention).__module__ == _OF_TE)


def _samples(layer: Any, make: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    own = type(layer).get_layer_static_inputs is TransformerLayer.get_layer_static_inputs
    if own and _SAMPLES.unknown_body() is None:
        # Not even created: Megatron would hold the masks of all layers at the same time.
        return GraphableMegatronModule.get_layer_static_inputs(layer, *args, **kwargs)
    made = make(*args, **kwargs)
    made.pop(MASK, None)
    return made


def _replay_args(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get(MASK, make) is None:
        del kwargs[MASK]
    return make(*args, **kwargs)
