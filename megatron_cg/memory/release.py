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

from collections.abc import Callable
from typing import Any

from megatron_cg.fsdp.fsdp_symbols import fsdp_class
from megatron_cg.upstream.patch import set_attribute, undone_after

_KEEPS = "megatron_fsdp_cuda_graph_mode"
RELIES_ON = (
    *fsdp_class("MegatronFSDP", "zero_grad_buffer", "param_and_grad_buffer"),
    *fsdp_class("ParamAndGradBuffer", "ddp_config"),
)


def let_gradients_go(fsdp: Any) -> Callable[[], None]:
    """Let ``zero_grad`` free the gradient copies of each step, as in a run without graphs.

    Do not use it if a CUDA graph reads the optimizer's gradients (a full-iteration graph, or a
    graph of the optimizer): see Note [Gradients that outlive their step].
    ``fsdp`` is the ``MegatronFSDP``; version 2 has no such copies. Returns the undo.
    """
    if not hasattr(fsdp, "param_and_grad_buffer"):
        return lambda: None
    return set_attribute(fsdp.param_and_grad_buffer.ddp_config, _KEEPS, False)


def drop_gradients(fsdp: Any) -> None:
    """Clear all gradients of the previous step, and free the optimizer's copies of them.

    Call it before a capture, on all ranks or on some: it issues no collective. See
    Note [Nothing of the last step is needed by a capture].
    """
    if hasattr(fsdp, "param_and_grad_buffer"):
        with undone_after(let_gradients_go(fsdp)):
            fsdp.zero_grad_buffer()
