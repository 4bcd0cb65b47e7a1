"""``--recompute-granularity full`` with graphs: each layer recomputes itself, inside its graph.

Note [Where the checkpoint is]
    Megatron puts the checkpoint around its call of a layer (``checkpointed_forward``). Around a
    graph it would save nothing: a graph keeps all that its backward pass reads in the pool. So
    while graphs exist, the block calls its layers plainly, and each layer that Megatron would
    recompute has the checkpoint in it. Its forward graph then keeps no activation, and its backward
    graph runs the forward pass again before it differentiates. The passes of all layers use the
    same memory of the pool one after another.

    Eager passes have Megatron's own, which runs nothing twice in a capture. There it is torch's
    reentrant one, which needs ``torch.autograd.backward`` without ``inputs``, as Transformer Engine
    calls it. A graph keeps no random states: rules refuse what draws, and warmups keep them to
    refuse the rest (``capture/observer.py``, Note [Two graphs, two draws]).

Note [Which layers]
    ``uniform`` recomputes all layers, in chunks of ``recompute_num_layers`` of which only the first
    input is kept. A graph has its input in static memory in any case, so a larger chunk saves
    nothing, and each layer is a chunk of its own. ``block`` recomputes the first
    ``recompute_num_layers`` layers.

    An MTP layer is recomputed by ``uniform`` alone. Megatron also recomputes
    the projection before it, which no graph holds; here that keeps its activations. One that is
    repeated is refused (``recompute/rules.py``).

Note [Lost gradients]
    Megatron's checkpoint is an autograd function of a layer's input alone, which needs no gradient
    behind a frozen embedding (``tensor_parallel/random.py``, ``CheckpointFunction``). A replay is a
    function of the weights too. So the input of a block must need one, also after the capture.

Note [Frozen weights]
    ``torch.matmul`` of a 3D input and a weight that needs no gradient looks at strides, also of a
    dimension of size 1 (``should_fold`` of ``LinearAlgebra.cpp``). Embeddings of one sequence are
    transposed: (s, 1, h) with the strides of (1, s, h). The first pass of Megatron's checkpoint
    gets these. In all others a hook of Megatron-FSDP makes a view, which has those of (s, 1, h).
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from megatron_cg.arguments.schema import recomputes_layers
from megatron_cg.errors import ConfigurationError, Violation, say
from megatron_cg.integrations.megatron.megatron_unit import HIDDEN, ObservedInputs
from megatron_cg.upstream import patch
from megatron_cg.upstream.megatron import LayerConfig, is_capturing, not_capturing, relax_rules
from megatron_cg.upstream.symbols import Symbol

_CHECKPOINTS = Symbol(
    "megatron.core.recompute:checkpointed_forward",
    "where Megatron puts the checkpoints of full recompute",
    fingerprints=("b74d031a67fcc88b",),
)
_MTP = Symbol(
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer"
    "._checkpointed_forward",
    "where Megatron puts the checkpoint of a layer of multi-token prediction",
    fingerprints=("d9391af079bd5b25",),
)
RELIES_ON = (_CHECKPOINTS, _MTP)
_MULTIPLY = (ColumnParallelLinear, RowParallelLinear, SharedExpertMLP, nn.Linear)
_LOST = (
    "full-recompute-lost-gradients",
    "{flag:--recompute-granularity full}, and a layer whose input needs no gradient",
    "Megatron's checkpoint gives no gradients to the weights of such a layer, without graphs too, "
    "and a graph gives them theirs",
    "train the embedding, call requires_grad_() on its output in a forward hook, or "
    "{type:--recompute-granularity selective}",
)
_FROZEN = (
    "full-recompute-frozen-weights",
    "{flag:--recompute-granularity full}, and a frozen weight that torch.matmul multiplies",
    "it chooses its kernel by strides that Megatron's checkpoint keeps, and a graph does not",
    "{add:--transformer-impl transformer_engine}, or {type:--recompute-granularity selective}",
)
_CALLERS = (TransformerBlock, MultiTokenPredictionLayer)
"""They ask their config whether to put checkpoints around the layers that they call."""


def allow_full_recompute() -> Callable[[], None]:
    """Let configs that are made from now on recompute whole layers and ask for graphs.

    Megatron's rule against both does not apply to them any more; others do. Returns the undo.
    Raises UpstreamChangedError if Megatron lacks the rules, or places its checkpoints otherwise.
    """
    for symbol in RELIES_ON:
        symbol.require_known_body()
    return relax_rules(_goes_into_layers, recompute_granularity=(None, "full"))


def _goes_into_layers(config: Any) -> bool:
    """Whether graphs can hold the recompute; otherwise Megatron's own rules tell what is wrong."""
    return (
        recomputes_layers(config)
        and config.cuda_graph_impl == "transformer_engine"
        and config.recompute_method in ("uniform", "block")
        and config.recompute_num_layers is not None
        and not config.distribute_saved_activations
        and not config.cpu_offloading
        and not config.moe_layer_recompute
    )


@patch.combined_undo
def recompute_in_layers(model: nn.Module, inputs: ObservedInputs) -> Iterator[patch.Undo]:
    """Move the checkpoints of full recompute into the layers of ``model``; returns the undo.

    Does nothing to a model that recomputes no whole layers. Call it between two steps, before a
    capture, with the ``inputs`` of the steps before, and undo it after the graphs are deleted.
    Raises ConfigurationError; see Note [Lost gradients] and Note [Frozen weights].
    """
    found: Any = (module for module in model.modules() if isinstance(module, _CALLERS))
    callers = [caller for caller in found if recomputes_layers(caller.config)]
    # Behind the first layer no input lacks a gradient that its own has.
    begins = (c.layers[0] for c in callers if isinstance(c, TransformerBlock) and c.layers)
    if any(inputs.is_never_differentiated(layer, HIDDEN) for layer in begins):
        raise ConfigurationError([Violation(*map(say, _LOST))])
    modules = (m for c in callers for layer in _recomputed(c) for m in layer.modules())
    weights = (p for m in modules if isinstance(m, _MULTIPLY) for p in m.parameters(recurse=False))
    if any(p.dim() == 2 and not p.requires_grad for p in weights):
        raise ConfigurationError([Violation(*map(say, _FROZEN))])
    for caller in callers:
        yield from map(_recompute, _recomputed(caller))
        if isinstance(caller, TransformerBlock):
            run = partial(_with_gradients, caller, caller.forward)
            yield patch.replace_function(caller, "forward", run)
        plain = LayerConfig(caller.config, recompute_granularity=None)
        yield patch.set_attribute(caller, "config", plain)


def _with_gradients(block: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs.get(HIDDEN)
    if block.training and torch.is_grad_enabled() and not getattr(hidden, "requires_grad", True):
        raise ConfigurationError([Violation(*map(say, _LOST))])
    return run(*args, **kwargs)


def _recomputed(caller: Any) -> list[nn.Module]:
    """The layers that ``caller`` has checkpoints around; see Note [Which layers]."""
    every = caller.config.recompute_method == "uniform"
    if isinstance(caller, MultiTokenPredictionLayer):
        return [caller.mtp_model_layer] if every else []
    layers = list(caller.layers)
    return layers if every else layers[: caller.config.recompute_num_layers]


def _recompute(layer: Any) -> Callable[[], None]:
    """Put a checkpoint into the passes of ``layer``: the eager one, and the captured region."""

    def recomputing(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not layer.training or not torch.is_grad_enabled():
                return run(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            own = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
            as_now = nullcontext if is_capturing() else not_capturing

            def once(*given: Any) -> Any:
                now = dict(enumerate(leaves)) | dict(zip(own, given, strict=False))
                args, kwargs = tree_unflatten(now.values(), spec)
                with as_now():
                    return run(*args, **kwargs)

            if not is_capturing():
                differentiated = torch.empty(0, device="cpu", requires_grad=True)  # As its input.
                return CheckpointFunction.apply(once, False, *own.values(), differentiated)
            warms_up = not torch.cuda.is_current_stream_capturing()
            return checkpoint(once, *own.values(), use_reentrant=True, preserve_rng_state=warms_up)

        return forward

    return patch.combine_undos(
        patch.replace_function(layer, name, recomputing(getattr(layer, name)))
        for name in ("forward", "_te_cuda_graph_capture")
    )
