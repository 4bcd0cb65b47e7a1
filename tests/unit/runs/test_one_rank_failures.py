"""A capture that fails on one rank only: all go on together, or the run ends with the reason."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_cg import restore
from megatron_cg.backends import driver
from megatron_cg.capture.session import open_sessions
from megatron_cg.errors import CaptureError, NotRestoredError
from megatron_cg.fastpath import bucketing, optimizer_step
from megatron_cg.fsdp import roles
from megatron_cg.integrations.megatron import helper as megatrons_helper
from megatron_cg.integrations.megatron import megatron_unit
from megatron_cg.tape.tape_backend import is_recording
from megatron_cg.tape.train import transformer_layers
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.telemetry import CaptureReport
from megatron_cg.tools.record.record import parameter_digests
from tests.unit import trainers
from tests.unit.one_mask import OneMask
from tests.unit.ranks import ended, on_ranks
from tests.unit.trainers import microbatch_of

LAYERS, WARMUPS = 2, 2

ERRORS: dict[str, type[Exception]] = {
    "exception": RuntimeError,
    "out of memory": torch.OutOfMemoryError,
}
STAGES = (
    "reading hooks, sample inputs, before the first hook, warmup forward, warmup backward, "
    "last warmup backward, capture forward, capture backward, publishing, installing the fast "
    "path, the fast path's last part"
).split(", ")

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
    forward = (TransformerLayer, "_te_cuda_graph_capture")
    backward = (torch.autograd, "backward")
    return {
        "reading hooks": (roles, "unit_hooks", 2),
        "sample inputs": (megatrons_helper, "in_dtype", 1),
        "before the first hook": (driver, "_check", 1),
        "warmup forward": (*forward, 2),
        "warmup backward": (*backward, 1),
        "last warmup backward": (*backward, LAYERS * WARMUPS),
        "capture forward": (*forward, LAYERS * WARMUPS + 2),
        "capture backward": (*backward, LAYERS * WARMUPS + 2),
        "publishing": (megatron_unit.MegatronUnit, "attach", 2),
        "installing the fast path": (bucketing, "install_gradients", 1),
        "the fast path's last part": (optimizer_step, "install_main_weights", 1),
        # When all ranks have agreed on their graphs.
        "after the last vote": (CaptureReport, "ended", 1),
        "writing back": (restore, "write_back", 1),
        "in a hook": (MegatronFSDP, "all_gather_and_wait_parameters_ready", 3),
    }[stage]


@contextmanager
def failing(owner: Any, name: str, number: int, error: BaseException) -> Iterator[dict[str, Any]]:
    """Let the ``number``-th call raise; yields what is known of that call."""
    real = getattr(owner, name)
    next_call = iter(range(1, 10_000)).__next__  # An iterator in a user's method is refused.
    seen: dict[str, Any] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if next_call() == number:
            seen["recording"] = is_recording()
            raise error
        return real(*args, **kwargs)

    with patch.object(owner, name, call):
        yield seen


def new_trainer() -> Any:
    # With dropout, a generator that is not put back shows in the next loss.
    trainer = trainers.new_trainer(CpuModelConfig(layers=LAYERS, dropout=0.1))
    # Megatron warms up until there are ten forward passes, counting the steps before capture.
    trainer.model.config.cuda_graph_warmup_steps = 10 - WARMUPS
    return trainer


def step(trainer: Any) -> list[Any]:
    loss, norm = trainer.step()
    return [loss.hex(), norm.hex(), parameter_digests(trainer.model)]


def train_through_failures() -> list[dict[str, Any]]:
    """In one process: each step after another failed capture; then one that succeeds."""
    messages = BufferingHandler(10_000)
    logging.getLogger("megatron_cg").addHandler(messages)
    eager_trainer = new_trainer()
    eager = [step(eager_trainer) for _ in range(len(CASES) + 2)]
    parallel_state.destroy_model_parallel()
    trainer = new_trainer()
    results: list[dict[str, Any]] = [{"eager": eager[0], "after": step(trainer)}]
    with microbatch_of(2):
        for case, expected in zip(CASES, eager[1:], strict=False):
            helper = trainers.helper_of(trainer, OneMask(), on_failure="eager")
            error = ERRORS[case.error](f"forced: {case}")
            messages.buffer.clear()
            mine = case.rank == dist.get_rank()
            fault: AbstractContextManager[dict[str, Any]] = nullcontext({})
            if mine:
                fault = failing(*call_that_fails(case.stage), error)
            with fault as seen:
                helper.capture()
            results.append({"eager": expected, "after": step(trainer), **seen})
            results[-1]["said"] = [record.getMessage() for record in messages.buffer]
            pipeline = trainer.model.module.all_gather_pipeline
            results[-1]["kept"] = "release_bucket" in vars(pipeline)
            results[-1]["graphs"] = helper.helper.graphs_created() or helper.session is not None
        helper = trainers.helper_of(trainer, OneMask(), on_failure="eager")
        helper.capture()
        results.append({"eager": eager[-1], "after": step(trainer)})
        results[-1]["graphs"] = helper.session.counters.as_dict()
        helper.controller.delete()
    parallel_state.destroy_model_parallel()
    return results


@pytest.fixture(scope="module")
def results() -> list[list[dict[str, Any]]]:
    return on_ranks(train_through_failures)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_all_go_on_with_the_same_numbers(results: list[list[dict[str, Any]]], number: int) -> None:
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


def capture(on_failure: str, *faults: tuple[str, str]) -> str:
    """``faults`` are stages on rank 1, and what is told of each."""
    trainer = new_trainer()
    attention: Any = transformer_layers(trainer.model)[0].self_attention
    attention.register_buffer("table", torch.zeros(2))
    trainer.step()
    with microbatch_of(2), ExitStack() as stack:
        helper = trainers.helper_of(trainer, OneMask(), on_failure=on_failure)
        for stage, text in faults if dist.get_rank() == 1 else ():
            stack.enter_context(failing(*call_that_fails(stage), RuntimeError(text)))
        helper.capture()
    return "went on"


def captured(on_failure: str, fault: tuple[str, str]) -> str:
    """How such a capture ends, and how many sessions are left."""
    try:
        said = capture(on_failure, fault)
    except (CaptureError, NotRestoredError) as error:
        said = str(error)
    return f"{open_sessions()} {said}"


ELSEWHERE = "rank 1, whose own log "


@pytest.mark.parametrize(
    ("on_failure", "fault", "said", "of_rank_1"),
    [
        (
            *("eager", ("after the last vote", "forced"), "^1 went on$"),
            "^0 this rank's capture failed.* all ranks had agreed on their graphs before",
        ),
        (
            *("eager", ("writing back", "read-only"), f"state of {ELSEWHERE}names it"),
            "buffer table of a SelfAttention: RuntimeError: read-only.",
        ),
        (
            *("error", ("installing the fast path", "no fast path")),
            f"^. capture failed on {ELSEWHERE}has the reason",
            "^. capture failed with RuntimeError: no fast path",
        ),
    ],
)
def test_ranks_end_with_the_cause(
    on_failure: str, fault: tuple[str, str], said: str, of_rank_1: str
) -> None:
    """After the last vote the failed one alone; else all, also with leave to go on eagerly."""
    first, second = on_ranks(partial(captured, on_failure, fault))
    assert re.search(said, first) and re.search(of_rank_1, second)


@pytest.mark.parametrize("first", [None, "no capture"])
def test_a_rank_whose_hook_raises_ends_with_the_reason(first: str | None) -> None:
    """In a capture, or after something else did."""
    before = () if first is None else (("before the first hook", first),)
    # Not the error raised here: it is from the rank that ended first.
    ends = ended(partial(capture, "eager", ("in a hook", "no unshard"), *before))
    assert "OutOfStepError: one of the forward_pre_hooks of layer " in ends[1]
    assert "raised RuntimeError: no unshard." in ends[1]
    assert first is None or f"RuntimeError: {first}" in ends[1]
    # The other rank waited for this one until it was gone, or was ended with it.
    assert "went on" not in ends.get(0, "")
