"""Runs of the real Megatron-FSDP whose order is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.ordering.doubles.device import modelled_device
from tests.unit.ordering.doubles.notes import Notes
from tests.unit.ordering.trace import Trace
from tests.unit.trainers import trainer_of

LAYERS = 3
"""More units than double buffers."""
STEPS = 2


@dataclass(frozen=True)
class Run:
    """What is trained, and how.

    ``graphs`` are scopes as in Megatron's ``cuda_graph_modules``, None is no graphs; ``only`` are
    the layers that get them. ``fast`` is the fast path, with graphs or without. ``changed`` is
    called with the trainer and what is traced, before the first step that is traced.
    """

    graphs: tuple[str, ...] | None = None
    fast: bool = False
    shape: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[int, ...] | None = None
    microbatches: int = 2
    evaluates: bool = False
    backend: Callable[[], Any] = TapeBackend
    before: Callable[[Any], object] | None = None
    """Called with the trainer before its first step."""
    around: Callable[[Any, Notes], Any] | None = None
    """A context that the traced steps run in."""


def traced(run: Run) -> Trace:
    """Train a few steps, and return the trace of the last ones, on this rank.

    Steps before the fast path is put in or graphs are captured, and the capture itself, are not
    traced. All work of theirs is over when the trace begins.
    """
    from megatron_cg.fastpath import install

    with ExitStack() as stack:
        notes = stack.enter_context(modelled_device())
        small = {"hidden_size": 16, "ffn_hidden_size": 16, "sequence_length": 4}
        modules = {} if run.graphs is None else {"graph_modules": run.graphs}
        shape = CpuModelConfig(
            **{"layers": LAYERS, **small, **modules, **run.shape}, fsdp_options=run.fsdp
        )
        graphs = run.graphs is not None
        made = trainer_of(shape, graphs=graphs, microbatches=run.microbatches)
        trainer = stack.enter_context(made)
        if run.before is not None:
            run.before(trainer)
        trainer.step()
        if graphs:
            trainer.capture(run.backend(), only=run.only, fast_path=run.fast)
        elif run.fast:
            stack.callback(install(trainer.model.module).close)
        name_memory(notes, trainer)
        if run.around is not None:
            stack.enter_context(run.around(trainer, notes))
        with notes.tracing():
            for _ in range(STEPS):
                trainer.step()
                if run.evaluates:
                    evaluate(trainer)
        name_memory(notes, trainer)
        return notes.trace


def traced_grouped_gemms(way: str) -> Trace:
    """The trace of experts whose weights autograd does not see; ``way`` as in ``test_detached``."""
    from megatron_cg import fastpath as fast
    from tests.unit.fastpath import test_detached

    with modelled_device() as notes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "install", partial(_traced_from_here, fast.install, notes))
        test_detached.fit(way, fast=True)
        return notes.trace


def _traced_from_here(install: Callable[[Any], Any], notes: Notes, model: Any) -> Any:
    path = install(model)
    notes.on = True
    return path


def evaluate(trainer: Any) -> None:
    """One forward pass without gradients."""
    trainer.model.eval()
    with torch.no_grad():
        trainer._forward()
    trainer.model.train()


@contextmanager
def on_another_stream(name: str, trainer: Any, notes: Notes) -> Iterator[None]:
    """Let the gradients of weights called ``name`` be computed and hooked on another stream.

    Autograd runs a node on the stream of its forward pass, here that of a branch of its own. The
    branch begins with the backward pass, for whose stream it waits, and its end is waited for
    when the pass is over (torch 2.11, ``engine.cpp``: leaf streams).
    """
    from megatron_cg.fastpath.part import find_cell, hook_functions
    from megatron_cg.upstream.patch import run_after, run_before, set_cell

    names = {id(p): n for n, p in trainer.model.module.raw_param.items()}
    main: Any = torch.cuda.current_stream()
    side: Any = torch.cuda.Stream()
    fsdp = trainer.model.module
    hook = find_cell(hook_functions(fsdp), "_process_post_backward_gradients")
    own = hook.cell_contents

    def begins() -> None:
        side.wait_stream(main)

    def ends() -> None:
        main.wait_stream(side)

    def called(parameters: list[Any]) -> None:
        parameter, *more = parameters
        if more or not names[id(parameter)].endswith(name):
            own(parameters)
            return
        with notes.paused():
            parameter.grad = parameter.grad.clone()
        with torch.cuda.stream(side):
            parameter.grad.mul_(1)
            own(parameters)

    with ExitStack() as undo:
        undo.callback(set_cell(hook, called))
        undo.callback(run_before(trainer, "_forward", ends))
        undo.callback(run_after(trainer, "_forward", begins))
        undo.callback(run_before(fsdp, "finish_grad_sync", ends))
        yield


def name_memory(notes: Notes, trainer: Any) -> None:
    """Say which storages are Megatron-FSDP's buffers."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as upstream

    for (name, _dtype), tensor in upstream.get_global_memory_buffer().buffer.items():
        notes.name(tensor, f"Megatron-FSDP's buffer {name}")
    for number, group in enumerate(trainer.model.module.param_and_grad_buffer.parameter_groups):
        for kind in ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer"):
            buffer = getattr(group, kind)
            if buffer is None:
                continue
            if buffer.data is not None:
                notes.name(buffer.data, f"the {kind} of bucket {number}")
            for key, bucket in getattr(buffer.temporary_bucket_allocator, "buckets", {}).items():
                notes.name(bucket.data, f"the unsharded {kind} of bucket {key}")
