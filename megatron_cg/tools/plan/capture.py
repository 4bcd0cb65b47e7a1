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

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributions import Distribution

from megatron_cg.backends.host_reads import HostReads
from megatron_cg.errors import CaptureError
from megatron_cg.hooks import HookSnapshot, ParameterHookSnapshot
from megatron_cg.integrations.megatron.units import run_region
from megatron_cg.moe.shared_expert import shared_experts_resume
from megatron_cg.tools.plan.planned_samples import Sample
from megatron_cg.tools.plan.pool import Pool, round_up
from megatron_cg.tools.plan.trace import Trace, tracing
from megatron_cg.upstream.capturing_flag import capturing_flag
from megatron_cg.upstream.patch import set_attribute

TORCH_GEMM_WORKSPACE = 32 << 20
"""torch 2.11, ``CUDABlas.cpp``: 32 MiB per stream on compute capability 9. The first product on the
capture stream allocates it, so in the pool, and torch keeps it."""


_TERMS = (
    "saved_activations",
    "outputs",
    "input_gradient",
    "weight_gradients",
    "forward_workspace",
    "backward_workspace",
)


@dataclass
class LayerCapture:
    """One graph."""

    memory: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TERMS, 0))
    """Bytes in the pool as the allocator counts them.

    ``forward_workspace`` is the peak of the forward pass without what remains after it, and
    ``backward_workspace`` that of the backward pass without what existed before and the gradients
    that it makes.
    """
    kernels: dict[str, int] = field(default_factory=dict)
    """Kernels of an eager ``forward`` and ``backward`` pass."""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    """``shape`` and ``dtype`` of each output."""
    differentiable_outputs: int = 0
    weights: int = 0
    """Number of parameters for which the graph computes gradients."""


def simulate(samples: Sequence[Sample], model: torch.nn.Module, options: Any) -> Capture:
    """Capture ``samples`` in TE's order. The modules' hooks are disabled meanwhile.

    ``model`` is in training mode and has raw parameters, all on the meta device.
    """
    capture = Capture(samples)
    capture.trace.known(*model.parameters(), *model.buffers())
    capture.trace.known(*(tensor for sample in samples for _, tensor in sample.inputs()))
    if list(options.get("_order") or [1, -1]) != [1, -1]:
        raise CaptureError("a graph for each of several microbatches is not captured")
    layers = [sample.layer for sample in samples]
    with ExitStack() as stack:
        # Validated once, when a layer creates it in warmup (such as jitter on a router's input).
        stack.callback(set_attribute(Distribution, "_validate_args", False))
        stack.callback(_quiet(layers))
        stack.callback(shared_experts_resume(layers))
        for index in range(len(samples)):
            capture.forward(index)
        for index in reversed(range(len(samples))):
            capture.backward(index)
    return capture


def _quiet(layers: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Take the hooks of the layers' modules and parameters off; returns the undo."""
    snapshots: list[HookSnapshot | ParameterHookSnapshot] = []
    for layer in layers:
        snapshots += [*map(HookSnapshot, layer.modules())]
        snapshots.append(ParameterHookSnapshot(list(layer.parameters())))
    with ExitStack() as undo:
        for snapshot in snapshots:
            snapshot.clear()
            undo.callback(snapshot.restore)
        return undo.pop_all().close


class Capture:
    """The graphs of a model, and the tensors that TE holds while it captures them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.pool = Pool()
        self.trace = Trace(self.pool)
        self.layers = [LayerCapture() for _ in samples]
        self._samples = samples
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._last_input_gradient: torch.Tensor | None = None
        self._gradient_sets: dict[tuple[Any, ...], int] = {}

    @property
    def output_gradients(self) -> int:
        """Bytes for the gradients of outputs, outside the pool."""
        return sum(self._gradient_sets.values())

    def forward(self, number: int) -> None:
        """Capture the forward pass of a graph."""
        sample, layer = self._samples[number], self.layers[number]
        before, kernels = self.pool.mark(), self.trace.launches
        with tracing(self.trace, _reads(sample, "forward")):
            result = run_region(sample.layer, sample.args, sample.kwargs, as_captured=True)
        outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result)
        del result
        size = self.trace.bytes_of(outputs)
        layer.memory["saved_activations"] = self.pool.allocated - before - size
        layer.memory["outputs"] = size
        layer.memory["forward_workspace"] = self.pool.recent_peak - self.pool.allocated
        layer.kernels["forward"] = self.trace.launches - kernels
        layer.outputs = [{"shape": list(t.shape), "dtype": str(t.dtype)} for t in outputs]
        layer.differentiable_outputs = sum(t.requires_grad for t in outputs)
        self._outputs[number] = outputs

    def backward(self, number: int) -> None:
        """Capture the backward pass of a graph."""
        sample, layer = self._samples[number], self.layers[number]
        outputs = [t for t in self._outputs.pop(number) if t.requires_grad]
        gradients = [torch.empty_like(t) for t in outputs]
        alike = tuple((t.shape, t.dtype) for t in gradients)
        sizes = (round_up(t.untyped_storage().nbytes()) for t in gradients)
        self._gradient_sets.setdefault(alike, sum(sizes))
        parameters = [p for p in sample.layer.parameters() if p.requires_grad]
        before, kernels = self.pool.mark(), self.trace.launches
        # In the backward pass too, Megatron checks this flag to skip recomputation.
        with capturing_flag(), tracing(self.trace, _reads(sample, "backward")):
            torch.autograd.backward(outputs, gradients)
        layer.kernels["backward"] = self.trace.launches - kernels
        peak = self.pool.recent_peak
        made = [p.grad for p in parameters if p.grad is not None]
        layer.weights = len(made)
        of_weights = self.trace.bytes_of(made)
        # Overwriting frees the previous one: TE frees it after the next layer's backward pass.
        self._last_input_gradient = sample.args[0].grad
        of_input = self.trace.bytes_of(t for t in [sample.args[0].grad] if t is not None)
        layer.memory["input_gradient"], layer.memory["weight_gradients"] = of_input, of_weights
        layer.memory["backward_workspace"] = max(0, peak - before - of_weights - of_input)
        for tensor in (sample.args[0], *parameters):
            tensor.grad = None


def _reads(sample: Sample, way: str) -> HostReads:
    return HostReads(sample.layer, f"{way} of layer {sample.index}", "meta")
