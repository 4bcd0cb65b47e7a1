"""Captures that fail in one of their stages, or meet a machine not at rest."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from megatron_cg.telemetry import note
from tests.functional.tampering.places import (
    ForcedError,
    before_capture,
    fingerprint,
    flags,
    helper_class,
    rank,
    wrap,
)

LAYERS = 3  # of the tiny presets that the functional tests train
COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "invalid": lambda x: x.sum().item(),
    "upload": lambda x: torch.tensor([1.0], device=x.device),
}
"""Copies between GPU and host, one in each direction."""


def note_state_around_capture() -> None:
    def wrapped(old: Callable[[Any], None]) -> Callable[[Any], None]:
        def create(self: Any) -> None:
            before = (fingerprint(self.helper.model[0]), flags())
            old(self)
            note("after_failure", {"same": before == (fingerprint(self.helper.model[0]), flags())})

        return create

    wrap(helper_class(), "capture", wrapped)


def on_call(number: int, error: BaseException, *, after: bool = False) -> Callable[[Any], Any]:
    """A wrapper that raises ``error`` once, before or after the work of the ``number``-th call."""
    numbers = count(1)

    def make(old: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            now = next(numbers) == number
            if now and not after:
                raise error
            result = old(*args, **kwargs)
            if now:
                raise error
            return result

        return wrapped

    return make


def fail_at(place: str) -> None:
    """Raise in one stage: warmup or capture of layer 1, publishing, installing the fast path.

    ``place`` is the stage, and after another @ the one rank that fails.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg.fastpath import optimizer_step
    from megatron_cg.integrations.megatron import megatron_unit

    stage, _, only = place.partition("@")
    note_state_around_capture()
    if only and rank() != int(only):
        return
    error: BaseException = ForcedError(f"forced in {stage}")
    if stage == "memory":
        error = torch.OutOfMemoryError("forced")
    layer, graph, capture = TransformerLayer, torch.cuda.CUDAGraph, "_te_cuda_graph_capture"
    stages: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
        "memory": (layer, capture, on_call(2, error)),
        "capture-forward": (graph, "capture_begin", on_call(2, error)),
        "capture-forward-end": (graph, "capture_end", on_call(2, error, after=True)),
        "capture-backward": (graph, "capture_begin", on_call(LAYERS + 2, error)),
        "publish": (megatron_unit.MegatronUnit, "attach", on_call(2, error)),
        "install": (optimizer_step, "install_main_weights", on_call(1, error)),
        **{name: (layer, capture, copying(copy)) for name, copy in COPIES.items()},
    }

    def break_unshard(helper: Any) -> None:
        """Let the third all-gather since capture began fail, which only hooks call."""
        model = helper.helper.model[0].module
        wrap(type(model), "all_gather_and_wait_parameters_ready", on_call(3, error))

    if stage == "hook":
        before_capture(break_unshard)
    else:
        wrap(*stages[stage])


def copying(copy: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
    """A forward that copies between host and GPU: why a capture most often fails for users."""

    def make(old: Any) -> Any:
        def wrapped(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                print(copy(hidden_states))
            return old(self, hidden_states, *args, **kwargs)

        return wrapped

    return make


def fail_earlier() -> None:
    """Queue work that fails, and capture before anybody has waited for it."""
    before_capture(lambda _helper: torch._assert_async(torch.zeros(1, device="cuda")))
