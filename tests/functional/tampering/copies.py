"""An average of the weights beside a run, made from copies of a layer."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from megatron_cg.hooks import HookKind
from megatron_cg.hooks.hook_records import FLAG_REGISTRIES
from megatron_cg.telemetry.record import note
from megatron_cg.telemetry.record_shards import digest
from tests.functional.tampering.places import wrap

KEPT = 0.9
SEQUENCE, SEQUENCES = 128, 2
OURS = {"forward", "_should_call_te_cudagraph", "__reduce_ex__"}
SHARED = {torch.Generator, torch.cuda.Stream, torch.cuda.Event}
"""Classes whose objects a copy shares with the original: none of them can be copied."""


def average_from(first: int) -> None:
    """Copy the first layer before each step from that one on, average its weights, run the copy.

    Notes for each copy which parts of this package it has, and digests of the average and of what
    the copy trains.
    """
    from megatron.training import training

    numbers = count(1)
    average: list[torch.Tensor] = []
    seen: list[dict[str, Any]] = []

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) >= first:
                model = kwargs["model"] if "model" in kwargs else args[2]
                seen.append(averaged(model[0], average))
                note("average", seen)
            return old(*args, **kwargs)

        return train_step

    wrap(training, "train_step", make)


def averaged(model: Any, average: list[torch.Tensor]) -> dict[str, Any]:
    """Make one copy, add its weights to ``average``, and return what the copy computes."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layer = next(module for module in model.modules() if isinstance(module, TransformerLayer))
    made = copied(layer, model)
    graphs = getattr(made, "cuda_graphs", ())
    found = {"ours": sorted(OURS & vars(made).keys()), "graphs": len(graphs)}
    # Megatron-FSDP's own hooks know nothing of a copy's parameters.
    for module in made.modules():
        for name in (*(kind.value for kind in HookKind), *FLAG_REGISTRIES):
            getattr(module, name).clear()
    weights = [parameter.detach() for parameter in made.parameters()]
    if not average:
        average.extend(weight.clone() for weight in weights)
    for old, new in zip(average, weights, strict=True):
        old.mul_(KEPT).add_(new, alpha=1 - KEPT)
    shape = (SEQUENCE, SEQUENCES, model.config.hidden_size)
    inputs = torch.linspace(-1, 1, SEQUENCE * SEQUENCES * shape[-1], device="cuda").reshape(shape)
    inputs = inputs.to(model.config.params_dtype).requires_grad_()
    outputs = made(hidden_states=inputs, attention_mask=None)
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    output.float().square().sum().backward()
    gradients = [t.grad for t in (inputs, *made.parameters()) if t.grad is not None]
    return {**found, "digests": [digest(t) for t in (*average, output, *gradients)]}


def copied(layer: Any, model: Any) -> Any:
    """A copy as for an average: whole weights; configuration, groups and generators are shared.

    Between two steps the layer holds its sharded parameters, or raw ones that may have no memory
    then: what stands for a raw one is its shard.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        uneven_dtensor_to_full_tensor,
    )

    fsdp, config = model.module, model.config
    sharded = dict(fsdp.param_and_grad_buffer.optimizer_named_parameters)
    shards = {id(raw): sharded[name] for name, raw in fsdp.raw_param.items()}
    # It holds methods of the optimizer and of the whole wrapped model.
    memo: dict[int, Any] = {id(config): config}
    with torch.no_grad():
        for parameter in layer.parameters():
            whole = uneven_dtensor_to_full_tensor(shards.get(id(parameter), parameter))
            whole = whole.to(config.params_dtype)
            memo[id(parameter)] = nn.Parameter(whole.clone())
    shared: set[Any] = SHARED | {type(group) for group in c10d._world.pg_map}
    for kind in shared:
        # What pickle reduces to a name is shared.
        copyreg.pickle(kind, lambda _: "shared")
    try:
        return copy.deepcopy(layer, memo)
    finally:
        for kind in shared:
            copyreg.dispatch_table.pop(kind, None)
