"""Digests of a model's parameter shards, so that two runs can be compared without their weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.fsdp.megatron_fsdp import find_megatron_fsdp

_BUFFERS = {
    "main": "main_weight_buffer",
    "model": "model_weight_buffer",
    "transpose": "transpose_weight_buffer",
}
RELIES_ON = (
    *fsdp_class("ParamAndGradBuffer", "parameter_groups", "param_to_name"),
    *fsdp_class("ParameterGroup", "params", *_BUFFERS.values()),
    *fsdp_class("DataParallelBuffer", "get_item", "is_data_distributed"),
)


def parameter_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of this rank's shard of every parameter, by ``<weights>:<parameter name>``.

    Under Megatron-FSDP the weights are ``main`` (updated by the optimizer), ``model`` (used by the
    layers) and, with FP8 parameters, ``transpose``. Without Megatron-FSDP, and for parameters that
    are not sharded, they are ``parameter``. Waits for the device.
    """
    if torch.cuda.is_available():
        # If weights are not sharded, the last step's all-gather may still be in flight on its own
        # stream.
        torch.cuda.synchronize()
    fsdp: Any = find_megatron_fsdp(model)
    if fsdp is None:
        return {f"parameter:{name}": digest(value) for name, value in model.named_parameters()}
    buffer = fsdp.param_and_grad_buffer
    digests: dict[str, str] = {}
    for group in buffer.parameter_groups:
        kinds = {kind: getattr(group, name) for kind, name in _BUFFERS.items()}
        present = {kind: weights for kind, weights in kinds.items() if weights is not None}
        # If only some of a group's weights are sharded (ZeRO-1 and 2), the others also hold copies
        # of weights that other ranks own. The next all-gather renews them, so their state at the
        # end of a run is random. This rank digests only the weights it owns.
        only_own = any(weights.is_data_distributed for weights in present.values())
        for item, parameter in enumerate(group.params):
            name = buffer.param_to_name[parameter]
            if not present:
                digests[f"parameter:{name}"] = digest(parameter)
            for kind, weights in present.items():
                value = weights.get_item(item, only_shard=only_own)
                digests[f"{kind}:{name}"] = digest(value)
    return digests


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes, for any dtype and device."""
    value = tensor.detach()
    local = getattr(value, "to_local", None)
    value = (local() if local is not None else value).cpu().contiguous()
    hashed = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    hashed.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
