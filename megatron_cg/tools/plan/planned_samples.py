"""Which layers are captured, with which static inputs: what our capture helper says itself.

Relied on: megatron-core 0.19.2, ``TECudaGraphHelper._discover_layers`` and
``_get_cuda_graph_input_data``, by way of
:class:`megatron_cg.integrations.megatron.helper.FsdpCudaGraphHelper`.
Without pipeline parallelism, which the rules refuse, Megatron captures one microbatch, and its
graph is replayed for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.integrations.megatron.helper import FsdpCudaGraphHelper
from megatron_cg.integrations.megatron.layer_scopes import give_scopes
from megatron_cg.integrations.megatron.masks import MASK, without_unused_masks

IN_PLACE = frozenset({"rotary_pos_emb"})
"""Inputs that are one tensor for all layers and steps, so that graphs read them where they are."""

STEPS_TO_SEE = 2
"""Steps before capture by which ``static_inputs.py`` knows that; with fewer, copies are made."""


@dataclass(frozen=True)
class Sample:
    """One graph to be captured."""

    index: int
    """Of the layer in the decoder."""
    layer: nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]

    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """All static inputs by name."""
        return [("hidden_states", self.args[0]), *self.kwargs.items()]


class PlannedHelper(FsdpCudaGraphHelper):
    """Our helper, as far as it discovers layers and makes their inputs; it has no votes."""

    def __init__(self, model: nn.Module, args: Any, selection: LayerSelection) -> None:
        self._scopes: dict[nn.Module, list[Any]] = {}
        self.controller = None
        self.selection = selection
        config = model.config
        # Past our own constructor, which opens a group of all ranks for their votes.
        super(FsdpCudaGraphHelper, self).__init__(
            [model], config, args.seq_length, args.micro_batch_size
        )

    def decoder_layers(self) -> list[nn.Module]:
        """All layers of the decoder, captured or not."""
        from megatron.core.utils import get_attr_wrapped_model

        owner = get_attr_wrapped_model(self.model[0], "decoder", return_model_obj=True)
        return list(owner.decoder.layers)

    def samples(self, *, masks: bool) -> tuple[list[Sample], dict[str, Any]]:
        """The graphs to be captured, and how TE is asked to; ``masks``: whether layers get any."""
        if not self.flattened_callables:
            return [], {"_order": [1, -1], "_num_layers_per_chunk": [0]}
        with ExitStack() as stack:
            if not masks:
                unmasked = without_unused_masks(self.flattened_callables, _NeverGiven())
                stack.callback(unmasked)
            stack.enter_context(torch.device("meta"))  # a mask is first made without a device
            args, options = self._get_cuda_graph_input_data()
        kwargs = options.pop("sample_kwargs", [{}] * len(args))
        layers = self.decoder_layers()
        places = {id(layer): index for index, layer in enumerate(layers)}
        found = []
        for number, layer in enumerate(self.flattened_callables):
            # A prediction layer comes after the decoder's.
            index = places.get(id(layer), len(layers) + number)
            found.append(Sample(index, layer, tuple(args[number]), dict(kwargs[number])))
        return found, options

    def scopes_given(self) -> Callable[[], None]:
        """Let each captured layer see its own scopes; returns the undo."""
        with ExitStack() as undo:
            for layer in self.flattened_callables:
                if self._layer_scopes(layer) != self._run_scopes():
                    undo.callback(give_scopes(layer, self._layer_scopes(layer)))
            return undo.pop_all().close


class _NeverGiven:
    """What is known of inputs in a run whose layers are never given a mask."""

    def is_never_given(self, _index: int, name: str) -> bool:
        return name == MASK


def masks_given(args: Any) -> bool:
    """Whether graphs have a mask: steps before capture show whether layers are given one."""
    return bool(args.create_attention_mask_in_dataloader or args.cuda_graph_warmup_steps < 1)


def copied(samples: Sequence[Sample], warmup_steps: int) -> Callable[[str], bool]:
    """Whether an input of that name has a copy of the graph's own."""
    in_place = IN_PLACE if warmup_steps >= STEPS_TO_SEE else frozenset()
    return lambda name: name not in in_place
