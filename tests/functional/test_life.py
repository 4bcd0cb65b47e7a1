"""What happens to a run between its steps, and however it ends: as in an eager run, and in time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.align.run import OVERDUE
from megatron_cg.tools.record.compare import Outcome
from tests.functional.cases import LIFE, resumed
from tests.functional.outcomes import assert_failed, assert_identical, assert_trained_alike

MIB = 2**20
pytestmark = pytest.mark.fault
Align = Callable[..., Outcome]
Log = Callable[..., str]


def numbers(run: Any) -> list[Any]:
    return [[(step["losses"], step["grad_norm"]) for step in run[r]["steps"]] for r in sorted(run)]


@pytest.mark.parametrize("name", ["saved-dropout", "saved-experts"])
def test_a_resumed_run_goes_on_as_the_one_that_was_not_interrupted(name: str, align: Align) -> None:
    whole, rest = align(LIFE[name]), align(resumed(LIFE[name], 6))
    assert_identical(whole, 12)
    assert_identical(rest, 6)
    for one, two in ((whole.eager, rest.eager), (whole.graphed, rest.graphed)):
        assert one is not None and two is not None
        assert [steps[6:] for steps in numbers(one)] == numbers(two)
        assert all(one[rank]["parameters"] == two[rank]["parameters"] for rank in one)


@pytest.mark.parametrize("name", ["dense", "peers"])
def test_graphs_deleted_and_captured_again(name: str, align: Align) -> None:
    case = replace(LIFE[name], name=f"{name}-again")
    for rank in assert_identical(align(case, mutation="again@6,7,10"), 12).values():
        # Three layers of one graph each, as always without pipeline parallelism, and two
        # microbatches; steps 4 and 5, 6, 7 to 9, 10 to 12.
        assert [counts["captured"] for counts in rank["sessions"]] == [3] * 4
        assert [counts["replayed"] for counts in rank["sessions"]] == [12, 6, 18, 18]


@pytest.mark.parametrize("name", ["dense", "peers"])
def test_fifty_captures_leave_no_memory_behind(name: str, align: Align) -> None:
    case = replace(LIFE[name], name=f"{name}-fifty")
    for rank in assert_identical(align(case, mutation="capture-often@50"), 12).values():
        allocated, reserved = map(list, zip(*rank["memory"], strict=True))
        assert len(allocated) == 50 and {*allocated[4:14]} == {*allocated[-10:]}, allocated
        # Now and then one segment for small tensors is not empty when it could be given back.
        assert max(reserved[-23:]) <= max(reserved[4:27]) + 2 * MIB, reserved


@pytest.mark.parametrize("name", ["bounded-meta", "bounded-peers"])
def test_steps_with_more_rows_than_graphs_have_room_for_are_repeated(
    name: str, align: Align, log: Log
) -> None:
    """With room for the average alone, nearly every step is."""
    case = LIFE[name]
    assert_identical(align(case), 12)
    assert "repeated: a rank had" in log(case)


def test_skipped_iterations(align: Align) -> None:
    assert_identical(align(LIFE["skipped"]), 10)


@pytest.mark.kills
def test_a_signal_ends_the_run_in_good_order(align: Align, log: Log, tmp_path: Path) -> None:
    case = LIFE["signal"]
    assert_identical(align(case), 7)
    assert "rank 1: 1 sessions open before step 7" in log(case)
    assert log(case).count("0 sessions open at exit") == case.gpus
    for run in ("eager", "graphs"):
        saved = tmp_path / run / "checkpoints" / "latest_checkpointed_iteration.txt"
        assert saved.read_text().strip() == "7"


@pytest.mark.kills
def test_process_groups_are_destroyed_while_graphs_with_nccl_in_them_live(
    align: Align, log: Log
) -> None:
    case = LIFE["destroy"]
    for rank, record in assert_trained_alike(align(case), steps=6).items():
        assert record["groups destroyed"] is True
        assert f"rank {rank}: 1 sessions open before destroying the groups" in log(case)
        assert f"rank {rank}: 0 sessions open after destroying the groups" in log(case)


@pytest.mark.kills
def test_a_script_that_leaves_training_takes_its_graphs_along(align: Align, log: Log) -> None:
    case = replace(LIFE["tensor-parallel"], name="exit")
    outcome = align(case, mutation="exit@7")
    assert outcome.graphed is not None, outcome.comparison.reason + outcome.log_tail
    assert [len(rank["steps"]) for rank in outcome.graphed.values()] == [6, 6]
    for rank in outcome.graphed:
        assert f"rank {rank}: 1 sessions open before step 7" in log(case)
        assert f"rank {rank}: 0 sessions open at exit" in log(case)


@pytest.mark.kills
@pytest.mark.parametrize(
    ("end", "reason", "logged"),
    [
        ("raise", "ForcedError: forced before step 7", "rank 1: 0 sessions open at exit"),
        ("kill", "", "Signal 9 (SIGKILL)"),
    ],
)
def test_a_rank_that_raises_or_is_killed_ends_the_run_with_the_cause(
    end: str, reason: str, logged: str, align: Align, log: Log
) -> None:
    case = replace(LIFE["tensor-parallel"], name=end)
    assert_failed(align(case, mutation=f"{end}@7"), reason)
    assert "rank 1: 1 sessions open before step 7" in log(case) and logged in log(case)
    assert OVERDUE not in log(case)


@pytest.mark.kills
def test_an_earlier_error_of_the_gpu_is_not_blamed_on_capture(
    align: Align, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does ``--cg-on-failure eager`` go on after it."""
    # Else torch's watchdog may see the error first and abort the process before it has a message.
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    flags = ("--cg-on-failure", "eager")
    case = replace(LIFE["dense"], name="earlier", graph_flags=flags)
    assert_failed(align(case, mutation="earlier-error"), "work queued before capture failed")
    assert OVERDUE not in log(case)
