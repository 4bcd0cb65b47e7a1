"""Records passes as CUDA graphs, in one memory pool and on one capture stream.

Note [What keeps the pool]
    The allocator frees a graph's pool when the last graph of the pool is gone. Tensors that do not
    own their memory lie in it, and a failed capture may reset every graph
    that there is. So a graph of one kernel is captured first, and reset last.

Note [Tensors without an owner]
    Results that were released are still read by replays. A tensor that owned their memory would
    keep the allocator from giving it to passes that are captured later. The pool itself lives as
    long as its graphs, so the memory stays mapped. Inductor's CUDA graphs do the same
    (``torch/_inductor/cudagraph_trees.py``).

Note [Registered generators]
    A graph is given, at each replay, the seed and offset of every generator that is registered with
    it. Torch registers the device's own generator (``CUDAGraph.capture_begin``). A draw from
    another one that is not registered is an error; see ``capture/guarded_capture.py``.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.cuda_cleanup import leave_pool, waited_for
from megatron_cg.backends.driver.capture import Recorder
from megatron_cg.backends.driver.graphed import Recording, Tensors
from megatron_cg.memory.storage import without_owners


class CudaRecording(Recording):
    def __init__(self, recorder: "CudaRecorder") -> None:
        self._recorder = recorder
        self.graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self._recorder.reset(self)


class CudaRecorder(Recorder):
    """Captures the passes of one capture.

    Captured code may draw from ``generators``, besides the device's own.
    """

    def __init__(self, pool: Any, generators: Sequence[torch.Generator], error_mode: str) -> None:
        self._pool, self._generators, self._error_mode = pool, tuple(generators), error_mode
        self._stream = torch.cuda.Stream()
        self._keeper = torch.cuda.CUDAGraph()
        self._open: list[CudaRecording] = []

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run the warmup on a stream of its own, as TE and torch do."""
        with self._captured(self._keeper):  # See Note [What keeps the pool].
            torch.zeros((), device="cuda")
        torch.cuda.synchronize()
        with waited_for(), torch.cuda.stream(torch.cuda.Stream()):
            yield

    @contextmanager
    def recording(self, module: nn.Module, label: str) -> Iterator[CudaRecording]:
        made = CudaRecording(self)
        self._open.append(made)
        for generator in self._generators:
            made.graph.register_generator_state(generator)
        with self._captured(made.graph):
            yield made

    def release(self, results: Tensors) -> Tensors:
        """Replace tensors in the pool by ones that do not own their memory; others stay."""
        segments = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(self._pool)
            if tuple(segment["segment_pool_id"]) == self._pool
        ]

        def is_in_pool(storage: torch.UntypedStorage) -> bool:
            return any(begin <= storage.data_ptr() < end for begin, end in segments)

        return without_owners(results, is_in_pool)

    def abandon(self) -> None:
        leave_pool(self._pool)
        for graph in [*(recording.graph for recording in self._open), self._keeper]:
            # After an error of the device every call of CUDA raises that error again.
            with suppress(RuntimeError):
                graph.reset()
        self._open.clear()

    def reset(self, recording: CudaRecording) -> None:
        """Release a graph, and with the last one the pool. Safe to call twice."""
        if recording not in self._open:
            return
        self._open.remove(recording)
        recording.graph.reset()
        if not self._open:
            self._keeper.reset()

    @contextmanager
    def _captured(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the block. Garbage collection could destroy another graph meanwhile.

        pytorch/pytorch#161037: destroying a graph is an error while another one is captured.
        """
        with ExitStack() as stack:
            stack.callback(gc.enable if gc.isenabled() else gc.disable)
            gc.disable()
            mode = self._error_mode
            stack.enter_context(torch.cuda.graph(graph, self._pool, self._stream, mode))
            yield
