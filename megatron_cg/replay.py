"""What a graphed layer runs instead of its forward.

Note [The replay stands in the place of forward]
    Megatron's ``GraphableMegatronModule.__call__`` returns ``_te_cuda_graph_replay(...)`` without
    going through ``torch.nn.Module.__call__``: no hook fires, and under Megatron-FSDP nothing is
    unsharded. Here the layer's own ``_should_call_te_cudagraph`` answers no, so that its call
    goes on to ``nn.Module.__call__``; FSDP's hooks run there, and between them, where the forward
    would run, ``_te_cuda_graph_replay``. Both are attributes of the instance: the class, and
    every layer that is not graphed, stay as they are.

Relied on: megatron-core 0.19.2, ``GraphableMegatronModule._should_call_te_cudagraph``,
``_te_cuda_graph_replay``, ``cuda_graphs`` and ``cuda_graph_manual_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron_cg.counters import Counters
from megatron_cg.undo import set_attribute

ManualHook = tuple[Callable[..., None], tuple[nn.Module, ...]]


def attach_replay(
    layer: nn.Module, before_replay: Sequence[ManualHook], counters: Counters
) -> Callable[[], None]:
    """Let ``layer`` replay its graphs in training, run eagerly in evaluation; returns the undo.

    Args:
        layer: a ``GraphableMegatronModule`` whose ``cuda_graphs`` are set.
        before_replay: (fn, arguments) run before each replay; see
            :attr:`megatron_cg.fsdp.transform.UnitHooks.before_replay`.
        counters: where replays and eager passes are counted.
    """
    target: Any = layer
    eager = target.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if target.training and target.cuda_graphs:
            counters.replayed += 1
            return target._te_cuda_graph_replay(*args, **kwargs)
        counters.eager += 1
        return eager(*args, **kwargs)

    with ExitStack() as undo:
        undo.callback(set_attribute(target, "forward", forward))
        undo.callback(set_attribute(target, "_should_call_te_cudagraph", _never))
        undo.callback(set_attribute(target, "cuda_graph_manual_hooks", list(before_replay)))
        return undo.pop_all().close


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False
