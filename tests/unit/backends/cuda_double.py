"""``torch.cuda`` on the CPU, as far as captures use it: streams, pools, and graphs that are tapes.

Torch's own ``torch.cuda.graph`` runs on it. As CUDA and torch 2.11 do, a capture that was
invalidated raises at its end, before the stream, the allocator and the generators are told. As the
allocator does, it gives memory of a pool that nobody owns to the graphs that are captured next:
their replays overwrite it. Work runs on a stream from when it is used until the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.base import CaptureRequest
from megatron_cg.native.native_backend import NativeBackend
from megatron_cg.tape.fakes import FakeStream, cpu_fakes, replaced
from megatron_cg.tape.tape_backend import Pool, recording, window
from tests.unit.backends.blocks import small

DEFAULT = "the default stream"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
REFUSED = "CUDA error: operation not permitted when stream is capturing"


class Stream(FakeStream):
    """A stream that is told apart from others."""


def seeing_a_gpu() -> AbstractContextManager[None]:
    return replaced(torch.cuda, "is_available", lambda: True)


class OnCpu(NativeBackend):
    device_type = "cpu"

    def __init__(self) -> None:
        with seeing_a_gpu():
            super().__init__()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def capture(self, request: CaptureRequest) -> Any:
        with seeing_a_gpu():
            graphs = super().capture(request)
        self.pool = None  # The double has no allocator that could lend memory.
        return graphs

    @contextmanager
    def preserved(self, callables: Any) -> Iterator[None]:
        with seeing_a_gpu(), super().preserved(callables):
            yield


class CudaDouble:
    """The state of the device, the allocator and all graphs."""

    def __init__(self) -> None:
        self.stream: Any = DEFAULT
        self.underway: tuple[int, int] | None = None
        """The pool to which the allocator routes allocations now."""
        self.users: dict[tuple[int, int], int] = {}
        """How many captured graphs hold each pool; a pool without any is freed."""
        self.memory: dict[tuple[int, int], Pool] = {}
        self.invalid = False
        self.graphs: list[Graph] = []
        self.running: set[Any] = set()
        """Streams with work for which the host has not waited."""

    def synchronize(self, *_device: object) -> None:
        self.refuse()
        self.running.clear()

    def refuse(self) -> None:
        """What a host read does in a capture: it invalidates the capture and raises."""
        if self.underway is not None:
            self.invalid = True
            raise torch.AcceleratorError(REFUSED)

    def handle(self) -> tuple[int, int]:
        made = (0, len(self.memory) + 1)
        self.memory[made] = Pool()
        return made

    def end_allocations(self, _device: int, pool: tuple[int, int]) -> None:
        if self.underway != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway = None

    def release_pool(self, _device: int, pool: tuple[int, int]) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0

    def snapshot(self, pool: tuple[int, int]) -> list[dict[str, Any]]:
        return [
            {"address": storage.data_ptr(), "total_size": storage.nbytes(), "segment_pool_id": pool}
            for storage in self.memory[pool]._own.values()
        ]

    def on(self, stream: Any) -> OnStream:
        return OnStream(self, stream)

    def set_stream(self, stream: Any) -> None:
        self.stream = stream


class OnStream:
    """As ``torch.cuda.stream``: the stream is left by ``__exit__`` alone."""

    def __init__(self, cuda: CudaDouble, stream: Any) -> None:
        self._cuda, self._stream, self._before = cuda, stream, cuda.stream

    def __enter__(self) -> None:
        self._before, self._cuda.stream = self._cuda.stream, self._stream
        self._cuda.running.add(self._stream)

    def __exit__(self, *_error: object) -> None:
        self._cuda.stream = self._before


class Graph:
    """A ``torch.cuda.CUDAGraph`` that records a tape."""

    def __init__(self, cuda: CudaDouble) -> None:
        self._cuda, self._stack = cuda, ExitStack()
        self.pool: tuple[int, int] | None = None
        self.tape: Any = None
        self.registered: list[Any] = []
        self.mode: str | None = None
        self.stream: Any = None
        self.overwrites: list[int] = []
        """Storages of earlier graphs that nobody owned when this one was captured."""
        self.resets = 0
        self.reset_among: set[Any] = set()
        """The streams on which work ran when it was reset."""
        cuda.graphs.append(self)

    def register_generator_state(self, generator: Any) -> None:
        assert self.tape is None
        self.registered.append(generator)

    def capture_begin(
        self, pool: tuple[int, int], capture_error_mode: str, **_of_later_torch: object
    ) -> None:
        cuda = self._cuda
        assert cuda.stream != DEFAULT and cuda.underway is None and self.tape is None
        cuda.underway, self.mode, self.stream = pool, capture_error_mode, cuda.stream
        cuda.running.discard(cuda.stream)  # Nothing runs in a capture.
        cuda.users[pool] = cuda.users.get(pool, 0) + 1
        made = {key for graph in cuda.graphs if graph.pool == pool for key in graph.tape.made}
        self.overwrites = [key for key in made if torch._C._storage_Use_Count(key) == 1]
        tape = recording(cuda.memory[pool], nn.Identity(), "a graph")
        self.tape = self._stack.enter_context(tape)

    def capture_end(self) -> None:
        cuda = self._cuda
        self._stack.close()
        if cuda.invalid:
            cuda.invalid = False
            raise torch.AcceleratorError(INVALIDATED)
        self.pool, cuda.underway = cuda.underway, None

    def replay(self) -> None:
        assert self.pool is not None and not self.resets and self._cuda.users[self.pool]
        self._cuda.running.add(self._cuda.stream)
        self._cuda.memory[self.pool].poison(self.overwrites)
        self.tape.replay()

    def reset(self) -> None:
        if self.pool is None:
            return
        cuda = self._cuda
        assert cuda.underway is None
        cuda.users[self.pool] -= 1
        if not cuda.users[self.pool]:
            for storage in cuda.memory[self.pool]._own.values():
                window(storage).fill_(0xFF)
        self.pool, self.resets, self.reset_among = None, self.resets + 1, {*cuda.running}


@contextmanager
def cuda_double(*, fakes: bool = True, seen: bool = True) -> Iterator[CudaDouble]:
    """Put the double in place of ``torch.cuda`` in the block, over the CPU fakes.

    ``fakes`` is False where these are there already. If ``seen`` is False, only :class:`OnCpu`
    sees a GPU: a recorder, for example, would ask a real one for its name.
    """
    cuda = CudaDouble()
    with ExitStack() as stack:
        if fakes:
            stack.enter_context(cpu_fakes())
        names = {
            "is_available": lambda: seen,
            "Stream": Stream,
            "stream": cuda.on,
            "set_stream": cuda.set_stream,
            "current_stream": lambda *_: cuda.stream,
            "synchronize": cuda.synchronize,
            "CUDAGraph": lambda: Graph(cuda),
            "graph_pool_handle": cuda.handle,
            "memory_snapshot": cuda.snapshot,
        }
        inner = {
            "_cuda_endAllocateToPool": cuda.end_allocations,
            "_cuda_releasePool": cuda.release_pool,
            "_host_emptyCache": lambda: None,
        }
        # Optimizers of torch 2.15 ask it whether a step is being captured.
        none = {"current_accelerator": lambda *_args, **_options: None}
        owners = ((torch.cuda, names), (torch._C, inner), (torch.accelerator, none))
        for owner, replacements in owners:
            for name, value in replacements.items():
                stack.enter_context(replaced(owner, name, value))
        yield cuda


WARMUPS = 3
"""The default of a request."""


def capture(*modules: nn.Module, **options: Any) -> Any:
    """Graphs of these modules, with everything restored as a session does."""
    backend = OnCpu()
    with backend.preserved(modules):
        return small(backend, *modules, **options)


class Calling(nn.Linear):
    def __init__(self, call: Callable[[], None], number: int) -> None:
        super().__init__(4, 4)
        self.call, self.passes, self.number = call, 0, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.number:
            self.call()
        return super().forward(x)
