"""What a capture backend does."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.cuda_cleanup import random_states_kept, stream_kept
from megatron_cg.fsdp.transform import CaptureTimeHooks
from megatron_cg.memory.scratch import IdlePool
from megatron_cg.replay.depends_on import Entry
from megatron_cg.replay.unit import ReplayFunction
from megatron_cg.upstream.te_if_loaded import fp8_recipe


class Backend:
    """Captures layers into graphs. The members here are those of a backend without FP8."""

    name: str
    device_type = "cuda"
    _pool: tuple[int, int] | None = None
    """The CUDA memory pool of the graphs, once they are captured."""

    def capture(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        *,
        capture_time_hooks: Sequence[CaptureTimeHooks],
        **options: Any,
    ) -> tuple[Callable[..., Any], ...]:
        """Warm the callables up and capture them, with the hooks outside of the graphs.

        ``options`` are those of TE's ``make_graphed_callables``. A graph's ``reset()`` releases it.
        """
        raise NotImplementedError

    def replay_function(self, graph: Any) -> ReplayFunction:
        """How autograd sees the replays of one graph that :meth:`capture` returned.

        Raises UpstreamChangedError if the graph is not built as expected.
        """
        found: ReplayFunction = graph.replay_function()
        return found

    def synchronize(self) -> None:
        """Wait until no graph is replaying: a replaying graph must not be destroyed."""
        torch.cuda.synchronize()

    def scratch(self) -> IdlePool | None:
        """Memory of the graphs that may be borrowed between two steps; None if there is none."""
        return IdlePool(self._pool) if self._pool is not None else None

    def numerics(self) -> Any:
        return fp8_recipe()

    def captured_numerics(self, index: int, options: Mapping[str, Any]) -> Any:
        """What :meth:`numerics` must return when a callable replays that ``options`` captured."""

    def entries(self, modules: Sequence[nn.Module]) -> list[Entry]:
        """Objects in ``modules``, besides their tensors, whose memory graphs read or write."""
        return []

    def without_updates(self) -> AbstractContextManager[None]:
        """Skip updates for the whole model, such as FP8 scales, in passes inside the block."""
        return nullcontext()

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        """Restore everything that capture leaves changed, also after an exception."""
        # The stream is left first: the others then exit on the original stream.
        with random_states_kept(callables, self.device_type), stream_kept():
            yield
