"""Memory that is held for graphs without need, and how to free it.

Note [Gradients that outlive their step]
    ``ParamAndGradBuffer.update_main_grads`` casts each gradient shard to the main weights' dtype
    for the optimizer. With bf16 gradients and fp32 weights, the defaults of 0.19.2, these copies
    take four bytes per parameter of the shard. ``zero_grad`` frees them before the next forward
    pass, unless ``megatron_fsdp_cuda_graph_mode`` is set. Megatron sets it for every
    ``--cuda-graph-impl`` except ``none`` (``megatron.training.training``, where the DDP config is
    created). A full-iteration graph needs this mode: it holds the addresses of the copies, and no
    Python runs in its replay. The graph of a layer never uses the copies: ``finish_grad_sync``
    creates them after all replays of a step, and the optimizer has read them before the next
    replay. In this mode the copies take memory in addition to all activations of the next step,
    and in addition to all memory of a capture. No other code reads the field.

Note [Nothing of the last step is needed by a capture]
    Megatron captures between two steps and clears all gradients afterwards
    (``TECudaGraphHelper._reset_after_capture``). A step also begins by clearing them. So clearing
    them before a capture changes no result, even if the capture fails and training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.upstream.patch import set_attribute, undone_after

logger = logging.getLogger(__name__)

_KEEPS = "megatron_fsdp_cuda_graph_mode"
RELIES_ON = (
    *fsdp_class("MegatronFSDP", "zero_grad_buffer", "param_and_grad_buffer"),
    *fsdp_class("ParamAndGradBuffer", "ddp_config", "optimizer_named_parameters"),
    *fsdp_class("ParamAndGradBuffer", "dist_main_grad", "parameter_groups"),
)


def let_gradients_go(fsdp: Any) -> Callable[[], None]:
    """Let ``zero_grad`` free the gradient copies of each step, as in a run without graphs.

    Do not use it if a CUDA graph reads the optimizer's gradients (a full-iteration graph, or a
    graph of the optimizer): see Note [Gradients that outlive their step].

    Args:
        fsdp: the ``MegatronFSDP``.

    Returns:
        The undo. Changes nothing if this Megatron-FSDP has no such mode.
    """
    config = fsdp.param_and_grad_buffer.ddp_config
    if not hasattr(config, _KEEPS):
        logger.warning("this Megatron-FSDP has no %s: gradients are left to it", _KEEPS)
        return lambda: None
    return set_attribute(config, _KEEPS, False)


def drop_gradients(fsdp: Any) -> None:
    """Clear all gradients of the previous step, and free the optimizer's copies of them.

    Call it before a capture, on all ranks or on some: it issues no collective. See
    Note [Nothing of the last step is needed by a capture].

    Args:
        fsdp: the ``MegatronFSDP``.
    """
    with undone_after(let_gradients_go(fsdp)):
        fsdp.zero_grad_buffer()


def gradient_copies(fsdp: Any) -> list[torch.Tensor]:
    """Local gradient shards that the optimizer reads and that are not views of FSDP's buffers."""
    store = fsdp.param_and_grad_buffer
    buffers = (group.main_grad_buffer for group in store.parameter_groups)
    own = {_key(buffer.data) for buffer in buffers if buffer is not None}
    found: dict[int, torch.Tensor] = {}
    for tensor in _optimizer_gradients(store):
        if _key(tensor) not in own:
            found.setdefault(_key(tensor), tensor)
    return list(found.values())


def _optimizer_gradients(store: Any) -> Iterable[torch.Tensor]:
    # In both places: FSDP's own table still holds a gradient that its parameter has lost.
    for _, parameter in store.optimizer_named_parameters:
        for gradient in (parameter.grad, getattr(parameter, "decoupled_grad", None)):
            if gradient is not None:
                yield _local(gradient)
    for gradient in store.dist_main_grad.values():
        if gradient._local_tensor is not None:
            yield gradient._local_tensor


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
