"""The harness can fail, and a capture that fails, or is undone, leaves nothing behind."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_cg.tools.align.compare import Outcome
from tests.functional.cases import DROPOUT, FP8, Case, batch
from tests.functional.life_cases import UNUSED
from tests.functional.outcomes import assert_failed, assert_left_eager, assert_trained_alike
from tests.functional.tampering import captures

pytestmark = pytest.mark.fault
Align = Callable[..., Outcome]


def case(name: str, *graph_flags: str) -> Case:
    flags = (*batch(8), *DROPOUT)
    return Case(name, "llama-tiny", ("attn", "mlp"), flags, graph_flags=graph_flags)


def moe_case(name: str, *graph_flags: str) -> Case:
    flags = (*batch(8), *DROPOUT, *FP8)
    scopes = ("attn", "moe_router")
    return Case(name, "deepseek-v3-tiny", scopes, flags, graph_flags=graph_flags)


@pytest.mark.kills
@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        ("no-phase-two", "CaptureError"),
        ("parameter-hooks-on", "CaptureError"),
        ("buffer-moved", "replayed no graph"),
    ],
)
def test_a_broken_run_never_passes(mutation: str, words: str, align: Align) -> None:
    assert_failed(align(case("broken"), mutation=mutation), words)


@pytest.mark.parametrize(
    ("stage", "make"),
    [*((stage, case) for stage in ("capture-forward", "upload")), ("capture-backward", moe_case)],
)
def test_a_failed_capture_leaves_an_eager_run(
    stage: str, make: Callable[..., Case], align: Align
) -> None:
    going_on = make("fail", "--cg-on-failure", "eager")
    outcome = align(going_on, mutation=f"fail@{stage}")
    assert_left_eager(outcome, steps=12)


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
    outcome = align(case("host-read"), mutation=f"host-read@{place}")
    reason = outcome.comparison.reason
    assert outcome.comparison.status == "failed"
    assert f"CaptureError: CUDA cannot capture the {place} pass of layer 1, {where}" in reason
    assert f"{source.name}:{number} in " in reason and f"`{statement}`" in reason
    assert "out of --cuda-graph-modules" in reason


@pytest.mark.kills
def test_what_a_rule_refuses_ends_before_a_model_is_built(
    align: Align, log: Callable[..., str]
) -> None:
    assert align(UNUSED).comparison.status == "failed"
    assert "CUDA graphs cannot be used as configured, 1 reason" in log(UNUSED)
    assert "[no-exchange] --cg-moe-exchange peer" in log(UNUSED)
    assert "number of parameters on (tensor" not in log(UNUSED)


@pytest.mark.kills
def test_the_host_read_that_ended_a_capture_is_logged_where_training_goes_on(
    align: Align, log: Callable[..., str]
) -> None:
    going_on = case("read", "--cg-on-failure", "eager")
    assert_trained_alike(align(going_on, mutation="fail@invalid"), steps=12)
    place = "in the callable itself (TransformerLayer), "
    assert f"CUDA cannot capture the forward pass of layer 0, {place}" in log(going_on)
    statement = inspect.getsource(captures.COPIES["invalid"]).strip()
    assert f"in <lambda>: `{statement}`" in log(going_on)


def test_deleted_graphs_leave_an_eager_run(align: Align) -> None:
    outcome = align(moe_case("delete"), mutation="delete@7")
    for rank in assert_trained_alike(outcome, steps=12).values():
        assert rank["after_delete"]["changed"] == []
        assert rank["after_delete"]["replayed"] > 0
