"""A capture that fails on one rank only: all go on together, or the run ends with the reason."""

import faulthandler
import logging
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from megatron_cg.backends.driver import capture as driver
from megatron_cg.backends.tape.tape_backend import is_recording
from megatron_cg.capture.session import open_sessions
from megatron_cg.errors import CaptureError
from megatron_cg.fastpath import bucketing, optimizer_step
from megatron_cg.fsdp import megatron_fsdp
from megatron_cg.telemetry.record_contents import parameter_digests
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit import trainers
from tests.unit.one_mask import OneMask
from tests.unit.ranks import on_ranks
from tests.unit.trainers import microbatch_of

LAYERS, WARMUPS, LENGTH, BATCH = 2, 2, 16, 2
HANGS_AFTER = 900.0
"""Seconds after which a process that waits for another is ended, with where it waits."""

ERRORS: dict[str, type[Exception]] = {
    "exception": RuntimeError,
    "out of memory": torch.OutOfMemoryError,
}
STAGES = (
    "reading hooks",
    "sample inputs",
    "before the first hook",
    "warmup forward",
    "warmup backward",
    "last warmup backward",
    "capture forward",
    "capture backward",
    "publishing",
    "installing the fast path",
    "the fast path's last part",
)

pytestmark = pytest.mark.fault


@dataclass(frozen=True)
class Case:
    stage: str
    error: str
    rank: int

    def __str__(self) -> str:
        return f"{self.error} at {self.stage} on rank {self.rank}"


CASES = [
    Case(stage, list(ERRORS)[number % 3 % 2], number % 2) for number, stage in enumerate(STAGES)
]


def call_that_fails(stage: str) -> tuple[Any, str, int]:
    """Owner, name, and which of its calls; forwards and backwards are two a pass."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg.integrations.megatron import helper, units

    forward = (TransformerLayer, "_te_cuda_graph_capture")
    backward = (torch.autograd, "backward")
    return {
        "reading hooks": (megatron_fsdp, "unit_hooks", 2),
        "sample inputs": (helper, "in_dtype", 1),
        "before the first hook": (driver, "_check_modules", 1),
        "warmup forward": (*forward, 2),
        "warmup backward": (*backward, 1),
        "last warmup backward": (*backward, LAYERS * WARMUPS),
        "capture forward": (*forward, LAYERS * WARMUPS + 2),
        "capture backward": (*backward, LAYERS * WARMUPS + 2),
        "publishing": (units, "attach_replay", 2),
        "installing the fast path": (bucketing, "install_gradients", 1),
        "the fast path's last part": (optimizer_step, "install_main_weights", 1),
    }[stage]


@contextmanager
def failing(owner: Any, name: str, number: int, error: Exception) -> Iterator[dict[str, Any]]:
    """Let the ``number``-th call raise; yields what is known of that call."""
    real = getattr(owner, name)
    calls = iter(range(1, 10_000))
    seen: dict[str, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            seen["recording"] = is_recording()
            raise error
        return real(*args, **kwargs)

    with patch.object(owner, name, call):
        yield seen


@contextmanager
def megatron_with_tapes() -> Iterator[None]:
    from megatron.core.transformer import cuda_graphs

    with (
        microbatch_of(BATCH),
        patch.object(cuda_graphs, "HAVE_TE_GRAPHS", True),
        patch.object(cuda_graphs, "make_graphed_callables", None, create=True),
    ):
        yield


def new_trainer() -> Any:
    # With dropout, a generator that is not put back shows in the next loss.
    model = CpuModelConfig(layers=LAYERS, sequence_length=LENGTH, dropout=0.1)
    trainer = trainers.new_trainer(model, micro_batch_size=BATCH)
    # Megatron warms up until there are ten forward passes, counting the steps before capture.
    trainer.model.config.cuda_graph_warmup_steps = 10 - WARMUPS
    return trainer


def new_helper(trainer: Any, on_failure: Any = "eager") -> Any:
    from megatron_cg.arguments.schema import GraphArguments
    from megatron_cg.integrations.megatron.helper import FsdpHelper, new_helper

    given = [trainer.model], trainer.model.config, LENGTH, BATCH, [trainer._optimizer]
    settings = GraphArguments(cg_on_failure=on_failure)
    return FsdpHelper(partial(new_helper, *given), OneMask(), settings)


def step(trainer: Any) -> list[Any]:
    loss, norm = trainer.step()
    return [loss.hex(), norm.hex(), parameter_digests(trainer.model)]


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def no_hang() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def train_through_failures() -> list[dict[str, Any]]:
    """In one process: each step after another failed capture; then one that succeeds."""
    from megatron.core import parallel_state

    messages = Messages()
    logging.getLogger("megatron_cg").addHandler(messages)
    eager_trainer = new_trainer()
    eager = [step(eager_trainer) for _ in range(len(CASES) + 2)]
    parallel_state.destroy_model_parallel()
    trainer = new_trainer()
    results: list[dict[str, Any]] = [{"eager": eager[0], "after": step(trainer)}]
    with megatron_with_tapes():
        for case, expected in zip(CASES, eager[1:], strict=False):
            helper = new_helper(trainer)
            error = ERRORS[case.error](f"forced: {case}")
            messages.texts.clear()
            mine = case.rank == dist.get_rank()
            fault: AbstractContextManager[dict[str, Any]] = nullcontext({})
            if mine:
                fault = failing(*call_that_fails(case.stage), error)
            with no_hang(), fault as seen:
                helper.capture()
            results.append({"eager": expected, "after": step(trainer), **seen})
            results[-1]["said"] = messages.texts[:]
            pipeline = trainer.model.module.all_gather_pipeline
            results[-1]["kept"] = "release_bucket" in vars(pipeline)
            results[-1]["graphs"] = helper.helper.graphs_created() or helper.session is not None
        helper = new_helper(trainer)
        with no_hang():
            helper.capture()
        results.append({"eager": eager[-1], "after": step(trainer)})
        results[-1]["graphs"] = helper.session.counters.as_dict()
        helper.delete()
    parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def results() -> list[list[dict[str, Any]]]:
    """Of each rank: the first step, one for each case, and the last with graphs."""
    return on_ranks(train_through_failures)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_all_ranks_go_on_eagerly_with_the_same_numbers(
    results: list[list[dict[str, Any]]], number: int
) -> None:
    case = CASES[number]
    failed, other = (results[rank][number + 1] for rank in (case.rank, 1 - case.rank))
    assert failed["recording"] is case.stage.startswith("capture") and "recording" not in other
    assert f"forced: {case}" in failed["said"][-1]
    assert f"capture failed on rank {case.rank}, whose own log has the reason" in other["said"][-1]
    for rank in (failed, other):
        assert rank["said"][-1].endswith("Training goes on eagerly (--cg-on-failure eager).")
        assert rank["graphs"] is False
        # No rank keeps the part that leaves out gathers, even if it was installed there.
        assert rank["kept"] is False
        assert rank["after"] == rank["eager"]


def test_a_capture_after_all_these_failures_replays(results: list[list[dict[str, Any]]]) -> None:
    for rank in results:
        assert rank[0]["after"] == rank[0]["eager"]
        assert rank[-1]["after"] == rank[-1]["eager"]
        assert (rank[-1]["graphs"]["captured"], rank[-1]["graphs"]["replayed"]) == (LAYERS, LAYERS)


def fail_after_the_last_vote() -> str:
    """Rank 1 fails when all ranks have agreed on their graphs."""
    from megatron_cg import events

    def fail(event: events.Event) -> None:
        if isinstance(event, events.CaptureEnded) and event.error is None:
            raise RuntimeError("forced")

    trainer = new_trainer()
    trainer.step()
    with megatron_with_tapes(), no_hang():
        helper = new_helper(trainer)
        if dist.get_rank() == 1:
            events.subscribers.append(fail)
        try:
            helper.capture()
        except CaptureError as error:
            return f"{open_sessions()} {error}"
    return str(open_sessions())


def test_a_rank_that_fails_after_the_last_vote_ends() -> None:
    first, second = on_ranks(fail_after_the_last_vote)
    assert first == "1"
    assert second.startswith("0 this rank's capture failed")
    assert "all ranks had agreed on their graphs before" in second


def capture_with_broken_unshard(root: Path, first: str | None) -> None:
    """In one process: on rank 1 a hook raises, in capture or after something else did."""
    trainer = new_trainer()
    trainer.step()
    gather = "all_gather_and_wait_parameters_ready"
    file = root / f"{dist.get_rank()}"
    with megatron_with_tapes(), no_hang(), ExitStack() as faults:
        helper = new_helper(trainer)
        if dist.get_rank() == 1:
            hook = (type(trainer.model.module), gather, 3)
            faults.enter_context(failing(*hook, RuntimeError("no unshard")))
            if first is not None:
                error = RuntimeError(first)
                faults.enter_context(failing(*call_that_fails("before the first hook"), error))
        try:
            helper.capture()
        except Exception:
            file.write_text(traceback.format_exc())
            raise
    file.write_text("went on")


@pytest.mark.parametrize("first", [None, "no capture"])
def test_a_rank_whose_hook_raises_ends_with_the_reason(first: str | None, tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException):
        run_processes(partial(capture_with_broken_unshard, tmp_path, first))
    # Not the error raised here: it is from the rank that ended first.
    text = (tmp_path / "1").read_text()
    assert "OutOfStepError: one of the forward_pre_hooks of callable" in text
    assert "raised RuntimeError: no unshard." in text
    assert first is None or f"RuntimeError: {first}" in text
    # The other rank waited for this one until it was gone, or was ended with it.
    other = tmp_path / "0"
    assert not other.exists() or "went on" not in other.read_text()


def capture_without_restoring() -> str:
    """In one process, with leave to go on: rank 1 cannot write a buffer back."""
    from megatron_cg import restore
    from megatron_cg.errors import NotRestoredError
    from megatron_cg.tools.cpu.cpu_model import transformer_layers

    trainer = new_trainer()
    transformer_layers(trainer.model)[0].self_attention.register_buffer("table", torch.zeros(2))
    trainer.step()
    with megatron_with_tapes(), no_hang(), ExitStack() as faults:
        helper = new_helper(trainer)
        if dist.get_rank() == 1:
            faults.enter_context(failing(restore, "write_back", 1, RuntimeError("read-only")))
        try:
            helper.capture()
        except NotRestoredError as error:
            return str(error)
    return ""


def test_all_ranks_end_if_one_of_them_cannot_restore_a_buffer() -> None:
    first, second = on_ranks(capture_without_restoring)
    assert "state of rank 1, whose own log names it" in first
    assert "buffer table of a SelfAttention: RuntimeError: read-only." in second


def capture_or_end() -> str:
    """In one process, without leave to go on: on rank 1 the fast path cannot be installed."""
    trainer = new_trainer()
    trainer.step()
    with megatron_with_tapes(), no_hang(), ExitStack() as faults:
        helper = new_helper(trainer, "error")
        if dist.get_rank() == 1:
            stage = call_that_fails("installing the fast path")
            faults.enter_context(failing(*stage, RuntimeError("no fast path")))
        try:
            helper.capture()
        except CaptureError as error:
            return str(error)
    return ""


def test_without_leave_to_go_on_all_ranks_end_with_the_cause() -> None:
    first, second = on_ranks(capture_or_end)
    assert first.startswith("capture failed on rank 1, whose own log has the reason")
    assert second.startswith("capture failed with RuntimeError: no fast path")
