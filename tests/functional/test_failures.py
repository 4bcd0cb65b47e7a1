"""The harness can fail, and a capture that fails, or is undone, leaves nothing behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cg.tools.align.compare import Comparison, Outcome
from tests.functional.cases import DROPOUT, FP8, Case, batch
from tests.functional.life_cases import SINKHORN
from tests.functional.tampering import captures

SCRIPT = Path(__file__).with_name("tampered.py")
Align = Callable[..., Outcome]
STAGES = (
    "samples",
    "warmup-forward",
    "warmup-backward",
    "memory",
    "capture-forward",
    "capture-forward-end",
    "invalid",
    "upload",
    "capture-backward",
    "publish",
    "install",
)


def case(name: str, *graph_flags: str) -> Case:
    flags = (*batch(8), *DROPOUT)
    return Case(name, "llama-tiny", ("attn", "mlp"), flags, graph_flags=graph_flags)


def moe_case(name: str, *graph_flags: str) -> Case:
    flags = (*batch(8), *DROPOUT, *FP8)
    scopes = ("attn", "moe_router")
    return Case(name, "deepseek-v3-tiny", scopes, flags, graph_flags=graph_flags)


def trained_alike(comparison: Comparison, steps: int) -> bool:
    """Every number and every shard equal; says nothing of whether graphs replayed."""
    values = comparison.values
    complete = len({value.step for value in values}) == steps and comparison.shards > 0
    return complete and all(v.same for v in values) and not comparison.different_shards


def assert_left_eager(outcome: Outcome, steps: int) -> None:
    """A capture failed: all ranks trained as eager, with hooks and flags of before it."""
    assert outcome.graphed is not None, outcome.comparison.reason + outcome.log_tail
    for rank in outcome.graphed.values():
        assert rank["after_failure"] == {"same": True}
    assert outcome.comparison.graphs.get("replayed", 0) == 0
    assert trained_alike(outcome.comparison, steps), outcome.comparison.reason


@pytest.mark.kills
@pytest.mark.parametrize(
    ("mutation", "status", "words"),
    [
        ("no-phase-two", "failed", "CaptureError"),
        ("wrapper-left-in", "failed", "Modules must not have hooks registered"),
        ("parameter-hooks-on", "failed", "CaptureError"),
        ("buffer-moved", "failed", "replayed no graph"),
    ],
)
def test_a_broken_run_never_passes(mutation: str, status: str, words: str, align: Align) -> None:
    outcome = align(case("broken"), script=SCRIPT, mutation=mutation)
    assert outcome.comparison.status == status, outcome.comparison.reason
    assert words in outcome.comparison.reason


def test_the_script_of_these_tests_passes_when_nothing_is_broken(align: Align) -> None:
    outcome = align(case("whole"), script=SCRIPT, mutation="none")
    assert outcome.comparison.status == "identical", outcome.comparison.reason + outcome.log_tail


@pytest.mark.parametrize(
    ("stage", "make"),
    [*((stage, case) for stage in STAGES), ("capture-backward", moe_case)],
)
def test_a_failed_capture_leaves_an_eager_run(
    stage: str, make: Callable[..., Case], align: Align
) -> None:
    going_on = make("fail", "--cg-on-failure", "eager")
    outcome = align(going_on, script=SCRIPT, mutation=f"fail@{stage}")
    assert_left_eager(outcome, steps=12)


@pytest.mark.kills
@pytest.mark.parametrize("stage", ["capture-forward", "memory"])
def test_without_leave_to_go_on_the_run_ends_with_the_error(stage: str, align: Align) -> None:
    outcome = align(case("fail"), script=SCRIPT, mutation=f"fail@{stage}")
    assert outcome.comparison.status == "failed"
    assert "CaptureError: capture failed with" in outcome.comparison.reason
    assert "Forced" in outcome.comparison.reason or "OutOfMemory" in outcome.comparison.reason


@pytest.mark.kills
@pytest.mark.parametrize(
    ("place", "where", "statement"),
    [
        ("forward", "in self_attention (SelfAttention), ", "print(output.sum().item())"),
        ("backward", "in ", "print(gradients[0].sum().item())"),
    ],
)
def test_a_host_read_that_no_rule_knows_is_named_by_module_and_line(
    place: str, where: str, statement: str, align: Align
) -> None:
    source = Path(captures.__file__)
    lines = source.read_text(encoding="utf-8").splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.strip() == statement)
    outcome = align(case("host-read"), script=SCRIPT, mutation=f"host-read@{place}")
    reason = outcome.comparison.reason
    assert outcome.comparison.status == "failed"
    assert f"CaptureError: CUDA cannot capture the {place} pass of layer 1, {where}" in reason
    assert f"{source.name}:{number} in " in reason and f"`{statement}`" in reason
    assert "out of --cuda-graph-modules" in reason


@pytest.mark.kills
def test_a_router_that_waits_for_the_host_is_refused_before_a_model_is_built(
    align: Align, log: Callable[..., str]
) -> None:
    outcome = align(SINKHORN)
    assert outcome.comparison.status == "failed"
    assert "CUDA graphs cannot be used as configured, 1 reason" in log(SINKHORN)
    assert "[sinkhorn-router] --moe-router-load-balancing-type sinkhorn" in log(SINKHORN)
    assert "number of parameters on (tensor" not in log(SINKHORN)


@pytest.mark.kills
def test_the_host_read_that_ended_a_capture_is_logged_where_training_goes_on(
    align: Align, log: Callable[..., str]
) -> None:
    going_on = case("read", "--cg-on-failure", "eager")
    outcome = align(going_on, script=SCRIPT, mutation="fail@invalid")
    assert trained_alike(outcome.comparison, steps=12), outcome.comparison.reason
    place = "in the callable itself (TransformerLayer), "
    assert f"CUDA cannot capture the forward pass of layer 0, {place}" in log(going_on)
    statement = inspect.getsource(captures.COPIES["invalid"]).strip()
    assert f"in <lambda>: `{statement}`" in log(going_on)


@pytest.mark.parametrize("make", [case, moe_case])
def test_deleted_graphs_leave_an_eager_run(make: Callable[..., Case], align: Align) -> None:
    outcome = align(make("delete"), script=SCRIPT, mutation="delete@7")
    assert outcome.graphed is not None, outcome.comparison.reason + outcome.log_tail
    for rank in outcome.graphed.values():
        assert rank["after_delete"]["changed"] == []
        assert rank["after_delete"]["replayed"] > 0
    assert trained_alike(outcome.comparison, steps=12), outcome.comparison.reason
