"""Measures one capture: seconds, with and without its warmup iterations, and memory.

Relied on: megatron-core 0.19.2, ``TECudaGraphHelper.create_cudagraphs`` (partial graphs, ours and
Megatron's), and for a whole iteration ``FullCudaGraphWrapper.__call__``, its
``cuda_graph["training"]`` and ``reset_cuda_graph``; torch 2.11, ``torch.cuda.graph.__enter__``,
which begins each graph; transformer-engine 2.20.2, ``graph.py``, ``_make_graphed_callables``, which
runs its warmup iterations before it begins the first graph.

Note [Warmup of a capture]
    TE runs each callable eagerly a few times before it captures any. These runs are as large as
    training and say nothing about the cost of capture. So they are measured separately: from the
    start of TE's function to the start of the first graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.tools.bench.measure.device import memory, reset_peaks, synchronize
from megatron_cg.upstream.patch import put_over, run_before
from megatron_cg.upstream.symbols import lookup

_TRAINING = "megatron.training.training"
_TE_GRAPHS, _TE_CAPTURE = "transformer_engine.pytorch.graph", "_make_graphed_callables"
_WARMUP, _FIRST_GRAPH = "warmup", "first graph"


class CaptureMeter:
    """Measures captures of this process.

    Args:
        note: receives the metrics of each capture.
    """

    def __init__(self, note: Callable[[Mapping[str, Any]], None]) -> None:
        self._note = note
        self._began: dict[str, float] | None = None
        """When parts of the capture began; None outside of a capture."""
        self.helper: Any = None
        """The Megatron helper of the last capture."""
        self._whole: Any = None

    def counts(self) -> dict[str, int] | None:
        """The counters of this package's graphs, if there are any."""
        session = getattr(self.helper, "session", None)
        return session.counters.as_dict() if session is not None else None

    def release(self) -> None:
        """Release the graph of a whole iteration, which Megatron keeps until the process ends.

        It would outlive the process groups whose work it contains; see the note on graphs before
        process groups in ``megatron_cg/integrations/megatron/teardown.py``.
        """
        whole, self._whole = self._whole, None
        if whole is not None:
            synchronize()
            whole.reset_cuda_graph()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Note every successful capture in the block, and the time of failed ones."""
        marks: dict[str, float] = {}
        self._began = marks
        synchronize()
        before = memory()
        reset_peaks()
        began = time.perf_counter()
        error = ""
        try:
            yield
        except BaseException as caught:
            error = type(caught).__name__
            raise
        finally:
            self._began = None
            if not error:
                synchronize()
            self._note(
                {
                    "seconds": time.perf_counter() - began,
                    "warmup_seconds": self._warmup_seconds(marks),
                    "memory_before": before,
                    "memory": memory() if not error else None,
                    "error": error,
                }
            )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Measure Megatron's captures in the block, both partial and full-iteration ones."""
        helpers = lookup("megatron-core", f"{_TRAINING}:TECudaGraphHelper", "the capture helper")
        wholes = lookup(
            "megatron-core", f"{_TRAINING}:FullCudaGraphWrapper", "full-iteration graphs"
        )
        create, call = helpers.create_cudagraphs, wholes.__call__

        def create_cudagraphs(helper: Any) -> None:
            self.helper = helper
            with self.measuring():
                create(helper)

        def call_whole(whole: Any, *args: Any, **kwargs: Any) -> Any:
            if not _captures(whole, **kwargs):
                return call(whole, *args, **kwargs)
            self._whole = whole
            with self.measuring():
                return call(whole, *args, **kwargs)

        with ExitStack() as undo:
            undo.callback(put_over(helpers, "create_cudagraphs", create_cudagraphs))
            undo.callback(put_over(wholes, "__call__", call_whole))
            graph_begins = partial(self._begins, _FIRST_GRAPH)
            undo.callback(run_before(torch.cuda.graph, "__enter__", graph_begins))
            # Without TE's function, the warmup cannot be measured separately, and is left out.
            with suppress(UpstreamChangedError):
                graphs = lookup("transformer-engine", _TE_GRAPHS, "TE's graphs")
                lookup("transformer-engine", f"{_TE_GRAPHS}:{_TE_CAPTURE}", "TE's capture")
                warmup_begins = partial(self._begins, _WARMUP)
                undo.callback(run_before(graphs, _TE_CAPTURE, warmup_begins))
            yield

    def _begins(self, part: str) -> None:
        if self._began is not None:
            self._began.setdefault(part, time.perf_counter())

    def _warmup_seconds(self, began: Mapping[str, float]) -> float | None:
        if _FIRST_GRAPH not in began:
            return None
        if self._whole:  # It is captured in its own step, without warmup.
            return 0.0
        return began[_FIRST_GRAPH] - began[_WARMUP] if _WARMUP in began else None


def _captures(whole: Any, **kwargs: Any) -> bool:
    """Whether this call of a ``FullCudaGraphWrapper`` captures its graph."""
    return (
        whole.cuda_graph["training"] is None
        and not kwargs.get("forward_only")
        and whole.curr_iter("training") == whole.cuda_graph_warmup_steps
    )
