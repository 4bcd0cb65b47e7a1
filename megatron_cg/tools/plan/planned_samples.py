"""Which layers are captured with which static inputs, as our capture helper reports.

Relied on: megatron-core 0.19.2, ``TECudaGraphHelper._discover_layers`` and
``_get_cuda_graph_input_data``. Without pipeline parallelism,
which the rules refuse, Megatron captures one microbatch and replays its graph for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.enums import CudaGraphModule
from torch import nn

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.integrations.megatron.full_recompute import recompute_in_layers
from megatron_cg.integrations.megatron.helper import in_dtype
from megatron_cg.integrations.megatron.masks import MASK, without_unused_masks
from megatron_cg.integrations.megatron.scopes import LayerScopes
from megatron_cg.integrations.megatron.weight_gradients import weight_gradients_returned

IN_PLACE = frozenset({"rotary_pos_emb"})
"""Inputs that are the same tensor for all layers and steps, so graphs read them in place."""

STEPS_TO_SEE = 2
"""``static_inputs.py`` needs this many steps before capture to detect that; fewer mean copies."""


@dataclass(frozen=True)
class Sample:
    """One graph to be captured."""

    index: int
    """Index of the layer in the decoder."""
    layer: nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]

    def inputs(self) -> list[tuple[str, torch.Tensor]]:
        """All static inputs by name."""
        return [("hidden_states", self.args[0]), *self.kwargs.items()]


class PlannedHelper(TECudaGraphHelper):  # type: ignore[misc]
    """Megatron's helper, limited to finding layers and making their inputs."""

    flattened_callables: list[Any]

    def __init__(self, model: nn.Module, args: Any, selection: LayerSelection) -> None:
        self._args = args
        super().__init__([model], model.config, args.seq_length, args.micro_batch_size)
        self._scopes = LayerScopes(self, selection)

    def _get_sample_arguments(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        sample_args, sample_kwargs = super()._get_sample_arguments(*args, **kwargs)
        for index, layer in enumerate(self.flattened_callables):
            without_attention = CudaGraphModule.attn not in self._scopes.of(layer)
            if without_attention and not self._scopes.is_of_run(layer):
                sample_kwargs[index] = dict(sample_kwargs[index])
                sample_kwargs[index].pop("rotary_pos_emb", None)
        return in_dtype(sample_args, self.config), sample_kwargs

    def decoder_layers(self) -> list[nn.Module]:
        """All layers of the decoder, captured or not."""
        from megatron.core.utils import get_attr_wrapped_model

        owner = get_attr_wrapped_model(self.model[0], "decoder", return_model_obj=True)
        return list(owner.decoder.layers)

    def samples(self) -> tuple[list[Sample], dict[str, Any]]:
        """The graphs to capture, and TE's options."""
        if not self.flattened_callables:
            return [], {"_order": [1, -1], "_num_layers_per_chunk": [0]}
        with ExitStack() as stack:
            if not masks_given(self._args):
                unmasked = without_unused_masks(self.flattened_callables, _NeverGiven())
                stack.callback(unmasked)
            stack.enter_context(torch.device("meta"))  # Megatron makes a mask without a device
            args, options = self._get_cuda_graph_input_data()
        kwargs = options.pop("sample_kwargs", [{}] * len(args))
        layers = self.decoder_layers()
        places = {id(layer): index for index, layer in enumerate(layers)}
        # A prediction layer follows the decoder's layers.
        found = [
            Sample(
                places.get(id(layer), len(layers) + number), layer, tuple(args[number]), dict(kw)
            )
            for number, (layer, kw) in enumerate(zip(self.flattened_callables, kwargs, strict=True))
        ]
        return found, options

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Change the layers in the block as a capture does: gradients, scopes, and recompute."""
        with ExitStack() as undo:
            returned = weight_gradients_returned(self.model[0], self.flattened_callables)
            undo.callback(returned)
            undo.callback(recompute_in_layers(self.model[0]))
            undo.callback(self._scopes.give(self.flattened_callables))
            yield


class _NeverGiven:
    """Observations of a run whose layers never receive a mask."""

    def is_never_given(self, _index: int, name: str) -> bool:
        return name == MASK


def masks_given(args: Any) -> bool:
    """Whether graphs have a mask: the steps before capture show whether layers receive one."""
    return bool(args.create_attention_mask_in_dataloader or args.cuda_graph_warmup_steps < 1)


def read_in_place(warmup_steps: int) -> frozenset[str]:
    """The names of inputs of which graphs have no copy."""
    return IN_PLACE if warmup_steps >= STEPS_TO_SEE else frozenset()
