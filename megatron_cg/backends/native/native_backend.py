"""CUDA graphs by ``torch.cuda.CUDAGraph``, without Transformer Engine.

For plain modules, Megatron's local spec, and TE's modules without FP8. Warmup, the order of passes,
hooks and the life of results are the driver's (``backends/driver/capture.py``), which CI runs on
the tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from megatron_cg.backends.base import Backend
from megatron_cg.backends.cuda_cleanup import stream_kept
from megatron_cg.backends.driver.capture import capture_modules
from megatron_cg.backends.driver.graphed import GraphedModule
from megatron_cg.backends.native.cuda_recorder import CudaRecorder
from megatron_cg.backends.native.native_refusals import refuse
from megatron_cg.backends.rng_tracker import forks_checked, generators_of, random_states_kept
from megatron_cg.backends.te.te_if_loaded import fp8_recipe, told_of_capture
from megatron_cg.errors import ArgumentError, CaptureError, Violation
from megatron_cg.fsdp.transform import CaptureTimeHooks
from megatron_cg.upstream.patch import garbage_collection_kept

ErrorMode = Literal["global", "thread_local", "relaxed"]


class NativeBackend(Backend):
    """Captures modules into CUDA graphs.

    Args:
        capture_error_mode: what CUDA refuses while a graph is captured: unsafe calls of all threads
            (``"global"``, torch's default), of the capturing thread, or none; see
            ``torch.cuda.graph``.

    Raises:
        CaptureError: there is no GPU.
        ArgumentError: another error mode.
    """

    name = "native"

    def __init__(self, capture_error_mode: ErrorMode = "global") -> None:
        if capture_error_mode not in get_args(ErrorMode):
            known = f"it is one of {', '.join(map(repr, get_args(ErrorMode)))}"
            found = f"capture_error_mode={capture_error_mode!r}"
            raise ArgumentError([Violation("argument", found, known, "leave it out")])
        if not torch.cuda.is_available():
            raise CaptureError(
                "the native backend captures CUDA graphs, and torch sees no GPU. Without one, "
                'compare on the tape: megatron-cg align --backend tape, or backend="tape".'
            )
        self._error_mode = capture_error_mode

    @property
    def device(self) -> torch.device:
        """Where captured modules and their inputs are."""
        return torch.device("cuda", torch.cuda.current_device())

    def capture(
        self,
        callables: tuple[nn.Module, ...],
        sample_args: Sequence[tuple[Any, ...]],
        *,
        capture_time_hooks: Sequence[CaptureTimeHooks],
        **options: Any,
    ) -> tuple[GraphedModule, ...]:
        """See :class:`megatron_cg.backends.base.Backend`.

        Raises CaptureError with every reason why a module cannot be captured, and otherwise as
        :func:`megatron_cg.backends.driver.capture.capture_modules`.
        """
        refuse(callables, sample_args, options.get("sample_kwargs") or (), self.device)
        pool = options.pop("pool", None) or torch.cuda.graph_pool_handle()
        generators = generators_of(callables, self.device.type)
        recorder = partial(CudaRecorder, pool, generators, self._error_mode)
        # The stream here too, since a failed rank runs other hooks before its state is restored.
        with stream_kept(), forks_checked(), told_of_capture():
            graphs = capture_modules(
                self.name,
                recorder,
                callables,
                sample_args,
                capture_time_hooks=capture_time_hooks,
                **options,
            )
        self._pool = pool
        return graphs

    def numerics(self) -> Any:
        """None, as at capture, or TE's recipe where FP8 is on: then no graph may replay."""
        return fp8_recipe()

    @contextmanager
    def preserved(self, callables: Sequence[nn.Module]) -> Iterator[None]:
        """Keep garbage collection, generators, the states of RNG trackers, and the stream."""
        with ExitStack() as stack:
            stack.enter_context(garbage_collection_kept())
            stack.enter_context(random_states_kept(callables, self.device.type))
            # Entered last and so left first: the others then exit on the original stream.
            stack.enter_context(stream_kept())
            yield
