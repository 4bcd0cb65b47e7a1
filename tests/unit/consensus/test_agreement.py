"""All ranks come to one decision, whatever happens to one of them; and nobody waits for ever."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import set_debug_level_from_env

from megatron_cg.consensus.decision import AgreementError, Kind, Vote, decide, digest, encode
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError, PhaseError
from megatron_cg.tape.launch import run_processes
from megatron_cg.tape.tape_backend import Pool, recording
from tests.unit.ranks import on_ranks

pytestmark = pytest.mark.fault
SHORT, LONG = timedelta(seconds=1), timedelta(minutes=10)
"""For a vote to which no other rank comes; for one to which all come, on however slow a machine."""
RANKS = 2


def said(*calls: Callable[[], Any]) -> list[str]:
    """What each call came to: nothing, or the error's name and text."""
    results = []
    for call in calls:
        try:
            call()
            results.append("went on")
        except (CaptureError, AgreementError, PhaseError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def confirmed_by_both(rank: int, votes: Agreement) -> Any:
    return said(votes.confirm, votes.report_failure)


def failed_between(rank: int, votes: Agreement) -> Any:
    return said(votes.ready, votes.report_failure if rank == 1 else votes.confirm)


def captured_twice(rank: int, votes: Agreement) -> Any:
    failed = said(votes.report_failure if rank == 1 else votes.ready)
    unopened = said(votes.ready, votes.confirm)
    votes.begin_capture()
    return [*failed, *unopened, *said(votes.ready, votes.ready, votes.confirm)]


def other_sizes(rank: int, votes: Agreement) -> Any:
    return said(lambda: votes.ready(Vote(size=96 + rank)), votes.report_failure)


def other_graphs(rank: int, votes: Agreement) -> Any:
    held = Vote(graphs=digest(["layer 0", f"layer {rank + 1}"]))
    return said(lambda: votes.ready(held), votes.report_failure)


def failed_alone(rank: int, _votes: Agreement) -> Any:
    votes = Agreement(SHORT)
    return said(votes.report_failure, votes.report_failure) if rank == 1 else None


def came_to_different_votes(rank: int, votes: Agreement) -> Any:
    kind = (Kind.MISMATCH, Kind.DELETION)[rank]
    return said(lambda: votes.agree(kind, Vote()), votes.ready, votes.report_failure)


def came_late(rank: int, votes: Agreement) -> Any:
    """Rank 0 waits a second, and rank 1 comes after that."""
    if rank == 1:
        dist.barrier()
    result = said(lambda: votes.agree(Kind.MISMATCH, Vote(), timeout=SHORT))
    if rank == 0:
        dist.barrier()
    return result


def left_a_graph(rank: int, votes: Agreement) -> Any:
    """Both ranks leave one graph; then each another; then they can leave none."""
    names = ("layer 0", f"layer {rank}", "layer 0")
    return said(*(partial(votes.on_any_rank, name) for name in names))


def names_given(rank: int, votes: Agreement) -> Any:
    first = votes.confirm(["both", f"rank {rank}"])
    votes.begin_capture()
    second = votes.confirm([])
    votes.begin_capture()
    third = votes.confirm(["second"] if rank else [])
    return [sorted(names) for names in (first, second, third)]


def was_opened_and_closed(rank: int, votes: Agreement) -> Any:
    """Whether five more agreements leave as many files open as the first."""
    counts = []
    for _ in range(6):
        other = Agreement(LONG)
        other.ready()
        other.close()
        other.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    closed = said(other.ready, other.report_failure)
    return [counts[0] == counts[-1], *closed]


def lost_a_rank(rank: int, votes: Agreement) -> Any:
    if rank == 1:
        os._exit(0)
    return said(lambda: votes.agree(Kind.DELETION, Vote()), votes.report_failure)


SCENARIOS = (
    *(confirmed_by_both, failed_between, captured_twice, other_sizes, other_graphs),
    *(failed_alone, came_to_different_votes, came_late, left_a_graph),
    *(names_given, was_opened_and_closed, lost_a_rank),
)


def vote_in_detail() -> list[Any]:
    """In one process, where torch checks each collective: votes of both, then one of rank 0."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    set_debug_level_from_env()
    rank = dist.get_rank()
    votes, alone = Agreement(LONG), Agreement(SHORT)
    decision = votes.agree(Kind.DELETION, Vote(against=rank == 1))
    result = [decision.against, *said(votes.ready, votes.confirm)]
    missed = said(alone.ready) if rank == 0 else []
    # Both end together: rank 0's exchange has rank 1 to connect to.
    dist.barrier()
    return [result, missed]


def play(root: Path) -> None:
    """In one process: every scenario with an agreement of its own; what came of it into files."""
    rank = dist.get_rank()
    for scenario in SCENARIOS:
        votes = Agreement(LONG)
        # A rank that ends at once would end one that is still connecting to it.
        dist.barrier()
        result = scenario(rank, votes)
        (root / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[Any]]:
    root = tmp_path_factory.mktemp("agreement")
    run_processes(partial(play, root), RANKS)

    def read(scenario: Any) -> list[Any]:
        paths = [root / f"{scenario.__name__}.{rank}.json" for rank in range(RANKS)]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    return read


ON_ONE = "CaptureError: capture failed on rank 1, whose own log has the reason"


def test_all_keep_what_all_have(outcome: Any) -> None:
    for agreed, late in outcome(confirmed_by_both):
        assert agreed == "went on" and late.startswith("CaptureError: this rank's capture failed")
        assert "all ranks had agreed on their graphs before" in late


def test_one_failure_makes_all_give_up(outcome: Any) -> None:
    first, second = outcome(failed_between)
    assert second == ["went on"] * 2 and first[0] == "went on" and first[1].startswith(ON_ONE)


def test_one_agreement_serves_one_capture_after_another(outcome: Any) -> None:
    first, second = outcome(captured_twice)
    assert first[0].startswith(ON_ONE) and second[0] == "went on"
    for told in (first, second):
        start, end, ready, again, whole = told[1:]
        assert start.startswith("PhaseError: the vote on capture start 1 is over: begin_capture()")
        assert end.startswith("PhaseError: the vote on capture end 1 is over")
        assert [ready, whole] == ["went on"] * 2
        assert again.startswith("PhaseError: the vote on capture start 2 is over")


def test_ranks_that_would_capture_other_sizes_or_graphs_capture_none(outcome: Any) -> None:
    for told in outcome(other_sizes):
        assert told[0].startswith(
            "CaptureError: ranks would capture different graphs (static sizes go"
        )
        assert "from 96 to 97" in told[0] and told[1] == "went on"
    for told in outcome(other_graphs):
        assert "(rank 1 would capture other graphs than most ranks)" in told[0]
        assert told[1] == "went on"


def test_a_rank_that_fails_alone_does_not_go_on(outcome: Any) -> None:
    for told in outcome(failed_alone)[1]:
        assert told.startswith("CaptureError: this rank's capture failed, and the other ranks did")
        assert "rank 0 did not come to the vote on capture start 1 within 1 seconds of" in told
        assert f"which is at {__file__}:" in told and "--cuda-graph-impl none" in told


def test_ranks_at_different_votes_all_end_and_vote_no_more(outcome: Any) -> None:
    mixed = "ranks came to different votes: mismatch 0 on rank 0, deletion 0 on rank 1"
    for told in outcome(came_to_different_votes):
        assert all(text.startswith(f"AgreementError: {mixed}") for text in told[:2])
        assert told[2].startswith("CaptureError: this rank's capture failed, and the other ranks")


def test_ranks_leave_a_graph_together_or_end(outcome: Any) -> None:
    for rank, told in enumerate(outcome(left_a_graph)):
        mismatch = f"AgreementError: rank 1 voted on another graph than layer {rank}"
        assert told[0] == "went on" and all(text.startswith(mismatch) for text in told[1:])


def test_a_vote_that_a_rank_misses_ends_on_both(outcome: Any) -> None:
    (first,), (second,) = outcome(came_late)
    assert first.startswith(
        "AgreementError: rank 1 did not come to the vote on mismatch 0 within 1"
    )
    assert "All ranks were last heard from " in first and "at the vote on settings 0." in first
    assert second.startswith("AgreementError: another rank has ended, or waits no longer (gloo: ")


def test_a_rank_that_died_ends_the_others(outcome: Any) -> None:
    (told,) = outcome(lost_a_rank)
    assert told[0].startswith("AgreementError: another rank has ended, or waits no longer (gloo: ")
    assert "; rank 1 did not come to the vote on deletion 0 with this rank" in told[0]
    assert told[1].startswith("CaptureError: this rank's capture failed, and the other ranks did")


def test_all_ranks_know_what_any_rank_has_given(outcome: Any) -> None:
    assert outcome(names_given) == [[["both", "rank 0", "rank 1"], [], ["second"]]] * 2


def test_a_closed_agreement_leaves_nothing_open(outcome: Any) -> None:
    for told in outcome(was_opened_and_closed):
        assert told[0] is True and len(told) == 3
        assert all(text.startswith("PhaseError: this agreement is closed") for text in told[1:])


def test_no_vote_is_taken_while_a_graph_is_captured(one_rank: None) -> None:
    votes = Agreement(LONG)
    with recording(Pool(), torch.nn.Identity(), "a layer"):
        for call in (votes.ready, votes.confirm, votes.report_failure):
            with pytest.raises(PhaseError, match="while a CUDA graph is captured"):
                call()
    votes.confirm()


def test_one_rank_agrees_with_itself(one_rank: None) -> None:
    votes = Agreement(LONG)
    votes.confirm()
    assert votes.agree(Kind.DELETION, Vote(against=True)).against == (0,)
    votes.begin_capture()
    votes.report_failure()
    votes.on_any_rank("layer 0")


def test_an_agreement_closes_after_the_process_groups(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    votes = Agreement(LONG)
    votes.confirm()
    dist.destroy_process_group()
    votes.close()


def test_votes_work_where_torch_checks_each_collective() -> None:
    (first, [missed]), (second, _) = on_ranks(vote_in_detail, RANKS)
    against, *rest = first
    assert first == second
    assert (against, rest) == ([1], ["went on"] * 2)
    assert missed.startswith("AgreementError: rank 1 did not come to the vote on capture start 1")


def test_of_two_sets_held_equally_often_that_of_the_lowest_rank_is_the_common_one() -> None:
    for held, minority in (((9, 3, 3, 9), (1, 2)), ((1, 1), ())):
        rows = [encode(Kind.DELETION, 3, Vote(graphs=graphs)) for graphs in held]
        assert decide(torch.stack(rows), range(len(held))).minority == minority


def test_a_digest_is_of_a_set_and_fits_a_row() -> None:
    assert digest(["b", "a", "b"]) == digest(("a", "b")) != digest(["ab"])
    assert digest(["a", "b"]) != digest(["a", "bc"]) and digest([]) != digest([""])
    assert all(0 < digest([str(number)]) < 2**63 for number in range(100))
