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
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.tools.bench.measure.device import memory, reset_peaks, synchronize
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import lookup

_MEGATRON = "megatron-core"
_TE_CAPTURE = "transformer_engine.pytorch.graph:_make_graphed_callables"


class CaptureMeter:
    """Measures captures of this process.

    Args:
        note: receives the metrics of each capture.
    """

    def __init__(self, note: Callable[[Mapping[str, Any]], None] = lambda _metrics: None) -> None:
        self.note = note
        self._capturing = False
        self._warmup_began: float | None = None
        self._first_graph: float | None = None
        self.helper: Any = None
        """The Megatron helper of the last capture."""
        self._whole: Any = None

    def counts(self) -> dict[str, int] | None:
        """The counters of this package's graphs, if there are any."""
        session = getattr(self.helper, "session", None)
        return session.counters.as_dict() if session is not None else None

    def loaded(self) -> dict[str, Any] | None:
        """What was loaded of layers that were compiled beforehand; see ``LayerCode``."""
        code = getattr(self.helper, "code", None)
        return None if code is None else code.loaded

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
        self._capturing, self._warmup_began, self._first_graph = True, None, None
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
            self._capturing = False
            if not error:
                synchronize()
            self.note(
                {
                    "seconds": time.perf_counter() - began,
                    "warmup_seconds": self._warmup_seconds(),
                    "memory_before": before,
                    "memory": memory() if not error else None,
                    "loaded": self.loaded(),
                    "error": error,
                }
            )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Measure Megatron's captures in the block, both partial and full-iteration ones."""
        helper = lookup(
            _MEGATRON, "megatron.training.training:TECudaGraphHelper", "the capture helper"
        )
        whole = lookup(
            _MEGATRON, "megatron.training.training:FullCudaGraphWrapper", "full-iteration graphs"
        )
        with ExitStack() as undo:
            for owner, name, wrap in (
                (helper, "create_cudagraphs", self._of_partial_graphs),
                (whole, "__call__", self._of_a_full_iteration),
                (torch.cuda.graph, "__enter__", self._of_one_graph),
            ):
                undo.callback(put_over(owner, name, wrap(getattr(owner, name))))
            undo.callback(self._watch_warmup())
            yield

    def _watch_warmup(self) -> Callable[[], None]:
        module_path, _, name = _TE_CAPTURE.partition(":")
        try:
            old = lookup("transformer-engine", _TE_CAPTURE, "TE's capture")
            module = lookup("transformer-engine", module_path, "TE's graphs")
        except UpstreamChangedError:
            # Then the warmup cannot be measured separately, and the metric is left out.
            return lambda: None
        return put_over(module, name, self._of_warmup(old))

    def _warmup_seconds(self) -> float | None:
        if self._first_graph is None:
            return None
        # A whole iteration is captured in its own step, without warmup.
        return 0.0 if self._whole else self._te_warmup_seconds(self._first_graph)

    def _te_warmup_seconds(self, first_graph: float) -> float | None:
        return None if self._warmup_began is None else first_graph - self._warmup_began

    def _of_partial_graphs(self, old: Callable[..., None]) -> Callable[..., None]:
        @wraps(old)
        def create_cudagraphs(helper: Any) -> None:
            self.helper = helper
            with self.measuring():
                old(helper)

        return create_cudagraphs

    def _of_a_full_iteration(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            captures = (
                wrapper.cuda_graph["training"] is None
                and not kwargs.get("forward_only")
                and wrapper.curr_iter("training") == wrapper.cuda_graph_warmup_steps
            )
            if not captures:
                return old(wrapper, *args, **kwargs)
            self._whole = wrapper
            with self.measuring():
                return old(wrapper, *args, **kwargs)

        return call

    def _of_one_graph(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def enter(graph: Any) -> Any:
            if self._capturing and self._first_graph is None:
                self._first_graph = time.perf_counter()
            return old(graph)

        return enter

    def _of_warmup(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(old)
        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            if self._capturing and self._warmup_began is None:
                self._warmup_began = time.perf_counter()
            return old(*args, **kwargs)

        return make_graphed_callables
