"""Simulates a capture on the meta device: what each layer allocates in the graph pool, and when.

Follows ``_make_graphed_callables`` of transformer-engine 2.20.2 (``pytorch/graph.py``) with the
options that Megatron 0.19.2 passes (``_order``, ``_reuse_graph_input_output_buffers``,
``clone_param_grads_on_return``):

* One pool serves all graphs. All forward passes are captured first, then the backward passes in
  reverse order. So the pool holds the saved activations of all layers at once.
* Static inputs, and the gradients of outputs (one set for all layers with the same outputs), are
  allocated outside the pool.
* After the capture of a layer's backward pass, its outputs and the gradients of its weights
  return to the pool (from then on TE holds them weakly). The gradient of its input returns after
  the next layer's backward pass.
* Memory that a pool has reserved stays reserved while its graphs live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from torch.distributions import Distribution

from megatron_cg.backends.host_reads import HostReads
from megatron_cg.hooks import HookSnapshot, ParameterHookSnapshot
from megatron_cg.hooks.capture_schedule import schedule
from megatron_cg.moe.shared_expert import shared_experts_resume
from megatron_cg.replay.region import run_region
from megatron_cg.tools.plan.planned_samples import Sample
from megatron_cg.tools.plan.pool import Pool, round_up
from megatron_cg.tools.plan.trace import Trace, tracing
from megatron_cg.upstream.patch import set_attribute

TORCH_GEMM_WORKSPACE = 32 << 20
"""torch 2.11, ``CUDABlas.cpp``: 32 MiB per stream on compute capability 9. The first product on the
capture stream allocates it, so in the pool, and torch keeps it."""


@dataclass
class LayerCapture:
    """One graph: bytes in the pool as the allocator counts them, and kernels."""

    saved_activations: int = 0
    outputs: int = 0
    forward_workspace: int = 0
    """Peak memory of the forward pass, minus what remains after it."""
    input_gradient: int = 0
    weight_gradients: int = 0
    backward_workspace: int = 0
    """Peak memory of the backward pass, minus what existed before and the gradients it makes."""
    forward_kernels: int = 0
    backward_kernels: int = 0
    output_shapes: list[tuple[list[int], str]] = field(default_factory=list)
    differentiable_outputs: int = 0
    weights: int = 0
    """Number of parameters for which the graph computes gradients."""


@dataclass
class Captured:
    """All graphs of a model."""

    layers: list[LayerCapture]
    pool_peak: int
    pool_reserved: int
    output_gradients: int
    """Bytes for the gradients of outputs, outside the pool."""
    torch_gemms: int


def simulate(samples: Sequence[Sample], model: torch.nn.Module, options: Any) -> Captured:
    """Capture ``samples`` in TE's order. The modules' hooks are disabled meanwhile.

    ``model`` is in training mode and has raw parameters, all on the meta device.
    """
    pool = Pool()
    trace = Trace(pool)
    trace.known(*model.parameters(), *model.buffers())
    trace.known(*(tensor for sample in samples for _, tensor in sample.inputs()))
    state = _Capture(samples, pool, trace)
    passes = schedule(
        len(samples), len(samples), options.get("_order"), options.get("_num_layers_per_chunk")
    )
    with ExitStack() as stack, torch.device("meta"):
        # Validated once, when a layer creates it in warmup (such as jitter on a router's input).
        stack.callback(set_attribute(Distribution, "_validate_args", False))
        stack.callback(_quiet(sample.layer for sample in samples))
        stack.callback(shared_experts_resume(sample.layer for sample in samples))
        for step in passes:
            if step.forward:
                state.forward(step.sample)
            else:
                state.backward(step.sample)
    return Captured(
        state.layers,
        pool.peak,
        pool.reserved,
        sum(round_up(size) for sizes in state.gradient_sets.values() for size in sizes),
        trace.torch_gemms,
    )


def _quiet(layers: Iterable[torch.nn.Module]) -> Any:
    undo = ExitStack()
    for layer in layers:
        for module in layer.modules():
            snapshot = HookSnapshot(module)
            snapshot.clear()
            undo.callback(snapshot.restore)
        parameters = ParameterHookSnapshot(list(layer.parameters()))
        parameters.clear()
        undo.callback(parameters.restore)
    return undo.close


def _reads(sample: Sample, way: str) -> HostReads:
    return HostReads(sample.layer, f"{way} of layer {sample.index}", "meta")


class _Capture:
    """The tensors that TE holds while it captures."""

    def __init__(self, samples: Sequence[Sample], pool: Pool, trace: Trace) -> None:
        self._samples, self._pool, self._trace = samples, pool, trace
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._last_input_gradient: torch.Tensor | None = None
        self.layers = [LayerCapture() for _ in samples]
        self.gradient_sets: dict[tuple[Any, ...], list[int]] = {}

    def forward(self, number: int) -> None:
        sample, layer = self._samples[number], self.layers[number]
        before, kernels = self._pool.mark(), self._trace.launches
        with tracing(self._trace, _reads(sample, "forward")):
            result = run_region(sample.layer, sample.args, sample.kwargs, as_captured=True)
        outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        del result
        held = self._pool.allocated - before
        storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in outputs}
        inside = {key: size for key, size in storages.items() if self._trace.took(key)}
        layer.outputs = sum(round_up(size) for size in inside.values())
        layer.saved_activations = held - layer.outputs
        layer.forward_workspace = self._pool.recent_peak - self._pool.allocated
        layer.forward_kernels = self._trace.launches - kernels
        layer.output_shapes = [(list(t.shape), str(t.dtype)) for t in outputs]
        layer.differentiable_outputs = sum(t.requires_grad for t in outputs)
        self._outputs[number] = outputs

    def backward(self, number: int) -> None:
        sample, layer = self._samples[number], self.layers[number]
        outputs = [t for t in self._outputs.pop(number) if t.requires_grad]
        gradients = [torch.empty_like(t) for t in outputs]
        key = tuple((t.shape, t.dtype) for t in gradients)
        self.gradient_sets.setdefault(key, [t.untyped_storage().nbytes() for t in gradients])
        parameters = [p for p in sample.layer.parameters() if p.requires_grad]
        before, kernels = self._pool.mark(), self._trace.launches
        # In the backward pass too, Megatron checks this flag to skip recomputation.
        cuda_graphs._set_capture_start()
        try:
            with tracing(self._trace, _reads(sample, "backward")):
                torch.autograd.backward(outputs, gradients)
        finally:
            cuda_graphs._set_capture_end()
        layer.backward_kernels = self._trace.launches - kernels
        peak = self._pool.recent_peak
        made = [p.grad for p in parameters if p.grad is not None]
        layer.weights = len(made)
        layer.weight_gradients = self._pooled(made)
        input_gradient = sample.args[0].grad
        layer.input_gradient = self._pooled([input_gradient])
        layer.backward_workspace = max(
            0, peak - before - layer.weight_gradients - layer.input_gradient
        )
        # Overwriting frees the previous one: TE frees it after the next layer's backward pass.
        self._last_input_gradient = input_gradient
        sample.args[0].grad = None
        del outputs, gradients, made, input_gradient
        for parameter in parameters:
            parameter.grad = None

    def _pooled(self, tensors: Sequence[torch.Tensor | None]) -> int:
        """Bytes of the tensors' storages, each counted once."""
        storages = {
            id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors if t is not None
        }
        return sum(round_up(size) for key, size in storages.items() if self._trace.took(key))
