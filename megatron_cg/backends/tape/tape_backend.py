"""A backend without a GPU: it records ATen operations on a tape instead of a CUDA graph.

Warmup, the order of passes, hooks and the life of results are the driver's
(``backends/driver/capture.py``), which follows TE's contract.

The tape reproduces these properties of a graph: no Python of the module runs at a replay, arguments
are addresses and not Python tensors, memory is poisoned as soon as other graphs of the pool might
use it, and a copy between host and device is refused. It does not reproduce kernels, streams or
speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.backends.driver.capture import capture_modules
from megatron_cg.backends.driver.graphed import GraphedModule
from megatron_cg.backends.rng_tracker import random_states_kept
from megatron_cg.backends.tape.tape_recorder import TapeRecorder
from megatron_cg.fsdp.transform import CaptureTimeHooks


class TapeBackend(Backend):
    """Records layers on tapes; the module's docstring says what they reproduce."""

    name = "tape"

    def capture(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        *,
        capture_time_hooks: Sequence[CaptureTimeHooks],
        **options: Any,
    ) -> tuple[GraphedModule, ...]:
        """See :class:`megatron_cg.backends.base.Backend`; raises as ``capture_modules``."""
        return capture_modules(
            self.name,
            TapeRecorder,
            callables,
            sample_args,
            capture_time_hooks=capture_time_hooks,
            **options,
        )

    def synchronize(self) -> None:
        """Nothing to wait for: a replay has finished when its call returns."""

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        """Always restore generators and the states of Megatron's RNG tracker."""
        with random_states_kept(callables, "cpu"):
            yield
