"""The protocol of a capture backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from megatron_cg.fsdp.transform import CaptureTimeHooks
from megatron_cg.memory.scratch import ScratchMemory
from megatron_cg.replay.guard.objects import Entry
from megatron_cg.replay.replay_function import ReplayFunction


class GraphedCallable(Protocol):
    """One layer's graph: called with tensors, differentiable, and releasable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, instead of the layer's forward."""

    def reset(self) -> None:
        """Release the graph; a later call raises."""


class Backend(Protocol):
    """Captures layers into graphs."""

    name: str

    def capture(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        *,
        capture_time_hooks: Sequence[CaptureTimeHooks],
        **options: Any,
    ) -> tuple[Callable[..., Any], ...]:
        """Warm the callables up and capture them, with the hooks outside of the graphs.

        ``options`` are those of TE's ``make_graphed_callables``.
        """

    def replay_function(self, graph: Any) -> ReplayFunction:
        """How autograd sees the replays of one graph that :meth:`capture` returned.

        Raises UpstreamChangedError if the graph is not built as expected.
        """

    def synchronize(self) -> None:
        """Wait until no graph is replaying: a replaying graph must not be destroyed."""

    def scratch(self) -> ScratchMemory | None:
        """Memory of the graphs that may be borrowed between two steps; None if there is none."""

    def numerics(self) -> Any:
        """The current state of numerics, such as FP8, comparable with ``==``."""

    def captured_numerics(self, index: int, options: Mapping[str, Any]) -> Any:
        """What :meth:`numerics` must return when callable ``index`` replays.

        ``options`` are those that :meth:`capture` was given.
        """

    def entries(self, modules: Sequence[nn.Module]) -> list[Entry]:
        """Objects in ``modules`` that have memory which the modules' graphs read or write."""

    def without_updates(self) -> AbstractContextManager[None]:
        """Skip updates for the whole model, such as FP8 scales, in passes inside the block."""

    def preserved(self, callables: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Restore everything that capture leaves changed, also after an exception."""
