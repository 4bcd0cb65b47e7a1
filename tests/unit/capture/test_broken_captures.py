"""A capture that is broken on purpose never trains as an eager run does, and never in silence.

Two processes train the real model on the tape and by the native backend on the double of
``torch.cuda``, once for each way of breaking it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_cg.capture import transaction as capture
from megatron_cg.fsdp import megatron_fsdp
from megatron_cg.hooks import HookSnapshot
from megatron_cg.tools.align.compare import Comparison, compare, read_run
from tests.functional.tampering.captures import (
    clear_all_but_a_wrapper,
    move_unsharded_buffers,
    untransformed,
)

WARMUP = 2
BACKENDS = ("tape", "native")
Votes = dict[tuple[str, ...], Comparison]
"""By backend and way of breaking."""


def plan(*, graphs: bool) -> Any:
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    model = CpuModelConfig(layers=3, graph_modules=("attn", "mlp"))
    return TrainingPlan(model=model, steps=5, warmup_steps=WARMUP, graphs=graphs)


@contextmanager
def with_a_buffer_moved() -> Iterator[None]:
    from megatron_cg.tools.cpu.train import Trainer

    before: Callable[..., Any] = Trainer.capture

    def moving(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = before(self, *args, **kwargs)
        move_unsharded_buffers()
        return session

    with patch.object(Trainer, "capture", moving):
        yield


BROKEN: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "unbroken": (nullcontext, ""),
    "no phase two": (
        lambda: patch.object(megatron_fsdp, "unit_hooks", untransformed),
        "_register_post_backward_hook",
    ),
    "wrapper left in": (
        lambda: patch.object(HookSnapshot, "clear", clear_all_but_a_wrapper),
        "HookError",
    ),
    "buffer moved": (with_a_buffer_moved, "replayed no graph"),
    "parameter hooks on": (
        lambda: patch.object(capture, "_quiet_parameters", lambda _: lambda: None),
        "Error",
    ),
}
"""How to break it, and what is said."""


def train_all(root: Path) -> None:
    """In one of the processes: eagerly, then broken in each way; errors go into the records."""
    from megatron_cg.tools.cpu.voting import train

    train(plan(graphs=False), root / "eager")
    for backend in BACKENDS:
        for name, (broken, _) in BROKEN.items():
            with native() if backend == "native" else nullcontext() as chosen, broken():
                try:
                    train(plan(graphs=True), root / backend / name, chosen)
                except Exception as error:
                    print(f"{name}: {type(error).__name__}")


@contextmanager
def native() -> Iterator[Any]:
    """The native backend."""
    from megatron_cg.backends.native import native_backend
    from tests.unit.backends.cuda_double import OnCpu, cuda_double

    # Under the fakes of the CPU, states of Megatron's tracker are tensors.
    forks = patch.object(native_backend, "forks_checked", nullcontext)
    with forks, cuda_double(fakes=False, seen=False):
        yield OnCpu()


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> Votes:
    from megatron_cg.tools.cpu.launch import run_processes

    root = tmp_path_factory.mktemp("broken")
    run_processes(partial(train_all, root))
    eager = read_run(root / "eager")
    cases = product(BACKENDS, BROKEN)
    return {case: compare(eager, read_run(root.joinpath(*case))) for case in cases}


@pytest.mark.parametrize("backend", BACKENDS)
def test_unbroken_graphs_train_as_eager(backend: str, votes: Votes) -> None:
    vote = votes[backend, "unbroken"]
    assert vote.status == "identical", vote.reason


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(BROKEN)[1:])
def test_a_broken_capture_never_passes(backend: str, name: str, votes: Votes) -> None:
    vote = votes[backend, name]
    assert vote.status == "failed" and BROKEN[name][1] in vote.reason, vote.reason
