"""A machine that is not at rest while graphs are captured."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_cg.telemetry.record import note
from tests.functional.tampering.places import before_capture, wrap

_BUSY_CYCLES = 50_000_000  # some 30 ms of a GPU


def fuse_gradients() -> None:
    """Train with gradient-accumulation fusion, without Apex: under Megatron-FSDP none is called.

    Notes how many layers have it in the first step.
    """
    from megatron.core.tensor_parallel import layers
    from megatron.training import training

    sys.argv.remove("--no-gradient-accumulation-fusion")
    layers._grad_accum_fusion_available = True
    counted: list[int] = []

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            if not counted:
                model = kwargs["model"] if "model" in kwargs else args[2]
                on = (getattr(m, "fuse_wgrad_accumulation", False) for m in model[0].modules())
                counted.append(sum(map(bool, on)))
                note("fused", counted[0])
            return old(*args, **kwargs)

        return train_step

    wrap(training, "train_step", make)


def collect_garbage_in_capture() -> None:
    """While a graph is captured, free tensors that another stream used, by garbage collection."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    garbage: list[torch.Tensor] = []
    collected = 0

    def litter(_helper: Any) -> None:
        side = torch.cuda.Stream()
        for _ in range(64):
            tensor = torch.ones(1 << 16, device="cuda")
            tensor.record_stream(side)
            garbage.append(tensor)

    def collecting(old: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal collected
            if torch.cuda.is_current_stream_capturing() and garbage:
                cycle: list[Any] = [garbage.pop()]
                cycle.append(cycle)
                del cycle
                gc.collect()
                collected += 1
                note("collected", collected)
            return old(self, *args, **kwargs)

        return wrapped

    before_capture(litter)
    wrap(TransformerLayer, "_te_cuda_graph_capture", collecting)


def keep_another_stream_busy() -> None:
    """Whenever a graph's capture begins, another stream has work that is still running."""
    streams: list[torch.cuda.Stream] = []
    begun = 0

    def busy(old: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            if not streams:
                streams.append(torch.cuda.Stream())
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(_BUSY_CYCLES)
            begun += 1
            note("begun", begun)
            return old(self, *args, **kwargs)

        return capture_begin

    wrap(torch.cuda.CUDAGraph, "capture_begin", busy)


def fail_earlier() -> None:
    """Queue work that fails, and capture before anybody has waited for it."""
    before_capture(lambda _helper: torch._assert_async(torch.zeros(1, device="cuda")))
