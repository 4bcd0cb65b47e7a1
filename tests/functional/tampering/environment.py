"""A machine that is not at rest while graphs are captured."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from megatron_cg.telemetry.sinks import note
from tests.functional.tampering.places import before_capture, wrap


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


def fail_earlier() -> None:
    """Queue work that fails, and capture before anybody has waited for it."""
    before_capture(lambda _helper: torch._assert_async(torch.zeros(1, device="cuda")))
