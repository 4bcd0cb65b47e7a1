"""Shared experts that overlap with the exchange of tokens, where the region of a graph ends.

With ``--moe-shared-expert-overlap`` Megatron's dispatcher computes the shared expert in stages, on
a stream of the shared expert's own. What one stage hands to the next is kept on the module, with a
state that says which stage is next (megatron-core 0.19.2, ``SharedExpertMLP._overlap_state``).

Note [A region that ends between two stages]
    A graph of ``moe_router`` and ``moe_preprocess`` holds the first stage alone. Megatron returns
    that stage's results as outputs of the graph and sets them on the module after a replay
    (``MoEAlltoAllTokenDispatcher.cudagraph_attrs``), but it leaves the state to itself. So its own
    second warmup pass fails: "pre_forward_comm must be called from IDLE state". Here each run of
    the region leaves the module as it found it, and the second stage goes on from the results that
    were set.

Note [Streams of a capture]
    A capture ends only after every stream that it forked has joined. The whole stages join by
    themselves: forward in ``get_output``, backward because autograd runs a node on the stream of
    its forward pass and waits for all such streams. The end of the region above is the place where
    nothing joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import CudaGraphModule
from torch import nn

from megatron_cg.upstream.patch import Undo, all_of, put_over
from megatron_cg.upstream.symbols import Symbol

_MODULE = "megatron.core.transformer.moe.shared_experts"
_STATES = Symbol(
    f"{_MODULE}:SharedExpertState",
    "which stage of a shared expert is next",
    attributes=("IDLE", "PRE_FORWARD_COMM_DONE"),
)
_RESULTS = (
    *("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output"),
    "gate_score",
)
RELIES_ON = (
    _STATES,
    Symbol(
        f"{_MODULE}:SharedExpertMLP",
        "a shared expert, with what its stages keep on it",
        attributes=("_overlap_state", "stream", "use_shared_expert_gate", *_RESULTS),
    ),
    Symbol(
        f"{_MODULE}:SharedExpertMLP.linear_fc1_forward_and_act",
        "the second stage of a shared expert",
    ),
    Symbol(
        "megatron.core.transformer.module:GraphableMegatronModule._te_cuda_graph_capture",
        "the part of a layer that its graph holds",
    ),
)


def shared_experts_resume(layers: Iterable[Any]) -> Callable[[], None]:
    """Let the regions of ``layers`` end between two stages of an overlapped shared expert.

    To be called before the first pass of a capture. Returns the undo, for after the graphs are
    gone. Raises UpstreamChangedError if Megatron has no such states.
    """
    return all_of(undo for layer in layers for undo in _resumes(layer))


def _resumes(layer: Any) -> Iterator[Undo]:
    shared = _overlapped(layer)
    if shared is not None:
        states = _STATES.find()
        region = partial(_region, states, shared, layer._te_cuda_graph_capture)
        yield put_over(layer, "_te_cuda_graph_capture", region)
        stage = partial(_second_stage, states, shared, shared.linear_fc1_forward_and_act)
        yield put_over(shared, "linear_fc1_forward_and_act", stage)


def gate_in_region(layer: Any) -> list[nn.Module]:
    """The overlapped shared expert, if its first stage is in the region and uses its gate."""
    shared = _overlapped(layer)
    begins = CudaGraphModule.moe_preprocess in layer.config.cuda_graph_modules
    return [shared] if shared is not None and shared.use_shared_expert_gate and begins else []


def _overlapped(layer: Any) -> Any:
    shared = getattr(getattr(layer, "mlp", None), "shared_experts", None)
    return shared if hasattr(shared, "_overlap_state") else None


def _region(states: Any, shared: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return run(*args, **kwargs)
    finally:
        if shared._overlap_state is not states.IDLE:
            shared._overlap_state = states.IDLE
            for name in _RESULTS:
                setattr(shared, name, None)
            # See Note [Streams of a capture]. Where this fails, the end of the capture does too.
            with suppress(RuntimeError):
                torch.cuda.current_stream().wait_stream(shared.stream)


def _second_stage(
    states: Any, shared: Any, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if shared._overlap_state is states.IDLE and shared.cached_fc1_input is not None:
        shared._overlap_state = states.PRE_FORWARD_COMM_DONE
    return run(*args, **kwargs)
