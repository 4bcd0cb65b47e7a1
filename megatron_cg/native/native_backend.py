"""CUDA graphs by ``torch.cuda.CUDAGraph``, without Transformer Engine.

For plain modules, Megatron's local spec, and TE's modules without FP8. Warmup, the order of passes,
hooks and the life of results are the driver's (``backends/driver.py``), which CI runs on the tape.

Note [Gradients that are written elsewhere]
    With fused accumulation the backward pass adds a weight's gradient to ``weight.main_grad``
    itself. Megatron's own linear layers (megatron-core 0.19.2, ``tensor_parallel/layers.py``,
    ``LinearWithGradAccumulationAndAsyncCommunication``) then set ``grad_added_to_main_grad`` from
    Python and return a tensor without values, or return None. TE's modules (2.20.2,
    ``fuse_wgrad_accumulation``) do the same. Warmup passes on made-up inputs would be added too.

Note [What keeps the pool]
    All passes are recorded in one memory pool, on one capture stream. The allocator frees the pool
    when its last graph is gone. Tensors that do not own their memory lie in it, and a failed
    capture may reset every graph that there is. So a graph of one kernel is captured first, and
    reset last.

Note [Tensors without an owner]
    Results that were released are still read by replays. A tensor that owned their memory would
    keep the allocator from giving it to passes that are captured later. The pool itself lives as
    long as its graphs, so the memory stays mapped. Inductor's CUDA graphs do the same
    (``torch/_inductor/cudagraph_trees.py``).
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_cg.backends import base, driver
from megatron_cg.errors import CaptureError, numbered, say
from megatron_cg.replay.guard import is_quantized
from megatron_cg.upstream.te import fp8_recipe, told_of_capture

_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
ErrorMode = Literal["global", "thread_local", "relaxed"]


class NativeBackend(base.Backend):
    """Captures modules into CUDA graphs.

    ``capture_error_mode`` says what CUDA refuses while a graph is captured: unsafe calls of all
    threads (``"global"``), of the capturing thread, or none; see ``torch.cuda.graph``.

    Raises CaptureError if there is no GPU.
    """

    name = "native"

    def __init__(self, capture_error_mode: ErrorMode = "global") -> None:
        if not torch.cuda.is_available():
            raise CaptureError(
                "the native backend captures CUDA graphs, and torch sees no GPU. Without one, "
                'compare on the tape: megatron-cg align --backend tape, or backend="tape".'
            )
        self._error_mode = capture_error_mode

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def capture(self, request: base.CaptureRequest) -> tuple[driver.GraphedModule, ...]:
        """See :class:`megatron_cg.backends.base.Backend`.

        Raises CaptureError with every reason why a module cannot be captured, and otherwise as
        :func:`megatron_cg.backends.driver.capture_modules`.
        """
        refuse(request, self.device)
        pool = torch.cuda.graph_pool_handle()
        generators = base.generators_of(request.callables, self.device_type)
        recorder = partial(CudaRecorder, pool, generators, self._error_mode)
        # The stream here too, since a failed rank runs other hooks before its state is restored.
        with base.stream_kept(), told_of_capture():
            graphs = driver.capture_modules(self.name, recorder, request)
        self.pool = pool
        return graphs


def refuse(request: base.CaptureRequest, device: torch.device) -> None:
    """Raise CaptureError with every reason why modules cannot be captured on ``device``."""
    reasons = []
    if fp8_recipe() is not None:
        reasons.append("FP8 is on (TE's autocast): leave the autocast before the capture")
    for index, module in enumerate(request.callables):
        reasons += [f"{request.label(index)}: {reason}" for reason in _of_module(module, device)]
    for tensor in tree_leaves([request.args, request.kwargs]):
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            reasons.append(f"a sample is on {tensor.device}: move it to {device}")
    if reasons:
        raise CaptureError(
            f"The native backend cannot capture, {numbered(reasons)}\n"
            f"Transformer Engine's backend captures FP8: {say('{flag:--cg-backend te}')}."
        )


def _of_module(root: nn.Module, device: torch.device) -> Iterator[str]:
    for name, module in root.named_modules():
        label = f"{name or 'the module itself'} ({type(module).__name__})"
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if getattr(module, "primary_weights_in_fp8", False) or any(map(is_quantized, own)):
            yield f"{label} has FP8 weights, whose scales no graph of this backend keeps"
        for option in _FUSED:
            if getattr(module, option, False):
                yield (
                    f"{label} has {option}=True, so its weight gradient is written into main_grad "
                    "and a replay would lose it: build the model with "
                    f"{option}=False ({say('{flag:--no-gradient-accumulation-fusion}')})"
                )
        delays = getattr(module, "need_backward_dw", None)
        if callable(delays) and delays():
            yield (
                f"{label} computes weight gradients after its backward pass: build the model with "
                "delay_wgrad_compute=False"
            )
        elsewhere = {tensor.device for tensor in own if tensor.device != device}
        for place in sorted(map(str, elsewhere)):
            yield f"{label} has parameters or buffers on {place}: move the model to {device}"


class CudaRecording(driver.Recording):
    def __init__(self, recorder: "CudaRecorder") -> None:
        self._recorder = recorder
        self.graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self._recorder.reset(self)


class CudaRecorder(driver.Recorder):
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
        with base.waited_for(), torch.cuda.stream(torch.cuda.Stream()):
            yield

    @contextmanager
    def recording(self, module: nn.Module, label: str) -> Iterator[CudaRecording]:
        made = CudaRecording(self)
        self._open.append(made)
        for generator in self._generators:  # Torch registers the device's own.
            made.graph.register_generator_state(generator)
        with self._captured(made.graph):
            yield made

    def release(self, results: driver.Tensors) -> driver.Tensors:
        """Replace tensors in the pool by ones that do not own their memory; others stay."""
        segments = [
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(self._pool)
            if tuple(segment["segment_pool_id"]) == self._pool
        ]

        def is_in_pool(storage: torch.UntypedStorage) -> bool:
            return any(begin <= storage.data_ptr() < end for begin, end in segments)

        return driver.without_owners(results, is_in_pool)

    def abandon(self) -> None:
        base.leave_pool(self._pool)
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
