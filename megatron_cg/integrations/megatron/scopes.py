"""Which scopes are captured of which layers, ``--cg-layers``."""

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.schema import WHOLE_LAYER, mtp_is_repeated
from megatron_cg.upstream.megatron import LayerConfig
from megatron_cg.upstream.patch import Undo, all_of, set_attribute
from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "megatron.core.transformer.cuda_graphs:_layer_is_graphable", "which layers have a scope"
    ),
)


class LayerScopes:
    """The captured scopes of each layer.

    Layers without one are taken off the lists of Megatron's ``helper``.
    """

    def __init__(self, helper: Any, selection: LayerSelection) -> None:
        self._config = helper.config
        self._of_run = list(self._config.cuda_graph_modules) or [WHOLE_LAYER]
        self._scopes: dict[nn.Module, list[Any]] = {}
        if helper.flattened_callables:
            by_name = {module.name: module for module in self._config.cuda_graph_modules}
            layers = list(helper.chunks_with_decoder[0].decoder.layers)
            for index, layer in enumerate(layers):
                names = selection.scopes(index, tuple(by_name))
                self._scopes[layer] = [by_name.get(name, name) for name in names]
        self._keep_captured(helper)

    def of(self, layer: nn.Module) -> list[Any]:
        """The scopes captured of one layer; those of the run for a layer of MTP."""
        return self._scopes.get(layer, self._of_run)

    def is_of_run(self, layer: nn.Module) -> bool:
        """Whether all scopes of the run are captured of this layer."""
        return self.of(layer) == self._of_run

    def give(self, layers: Sequence[nn.Module]) -> Undo:
        """Let the config of each of ``layers`` name the scopes captured of it; returns the undo."""
        return all_of(
            give_scopes(layer, self.of(layer)) for layer in layers if not self.is_of_run(layer)
        )

    def _keep_captured(self, helper: Any) -> None:
        """Without pipeline parallelism Megatron's helper has one list of layers."""
        repeated = mtp_is_repeated(self._config)
        pairs = [
            (layer, is_mtp)
            for layer, is_mtp in zip(
                helper.flattened_callables, helper.flattened_callables_is_mtp, strict=True
            )
            if not (is_mtp and repeated) and self._is_captured(layer)
        ]
        helper.flattened_callables = [layer for layer, _ in pairs]
        helper.flattened_callables_is_mtp = [is_mtp for _, is_mtp in pairs]
        helper.callables_per_chunk = [helper.flattened_callables]
        helper.callables_per_chunk_is_mtp = [helper.flattened_callables_is_mtp]
        helper.num_layers_per_chunk = [len(pairs)]

    def _is_captured(self, layer: nn.Module) -> bool:
        if self.is_of_run(layer):
            return True
        scopes = self.of(layer)
        view = LayerConfig(self._config, cuda_graph_modules=scopes)
        return bool(scopes) and bool(cuda_graphs._layer_is_graphable(layer, view))


def give_scopes(layer: nn.Module, modules: Sequence[Any]) -> Undo:
    """Set ``modules`` as the scopes of ``layer`` and of its MoE layer, if any; returns the undo."""
    return all_of(
        set_attribute(owner, "config", LayerConfig(config, cuda_graph_modules=list(modules)))
        for owner in (layer, getattr(layer, "mlp", None))
        if (config := getattr(owner, "config", None)) is not None
    )


def is_mtp(layer: Any) -> bool:
    return bool(getattr(layer, "is_mtp_layer", False))


def name_of(layer: Any) -> str:
    """Its number from 0. Layers of multi-token prediction have numbers of their own."""
    return f"{'MTP ' * is_mtp(layer)}layer {layer.layer_number - 1}"


def leave_out(layer: Any, module: nn.Module | None) -> str:
    """What to type so that no graph of ``layer`` contains ``module``, which is below it or None."""
    index = layer.layer_number - 1
    scopes = [scope.name for scope in layer.config.cuda_graph_modules]
    if not scopes:
        alone = f", or leave the layer out: --cg-layers layer takes ranges without {index}"
        instead = "Name the scopes that do not hold it with --cuda-graph-modules"
    else:
        held = "" if module is None else f" that holds the {type(module).__name__}"
        instead = f"Leave the scope{held} out of --cuda-graph-modules {' '.join(scopes)}"
        alone = f"; or, for this layer alone, give that scope ranges without {index} in --cg-layers"
    return f"{instead}{'' if is_mtp(layer) else alone}."
