"""Between steps all ranks capture again, or none does; without that they hang."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_cg.consensus import boundary
from megatron_cg.consensus.boundary import Boundary
from megatron_cg.consensus.decision import AgreementError, Decision, Kind, Level, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.tools.cpu.launch import run_processes

KEEP, RECAPTURE, GIVE_UP = Level
LONG = timedelta(minutes=10)
RANKS, ASKING = 4, 2
STEPS, WARMUP, ASKED = 5, 1, 1
LIMIT = 5.0
"""Seconds that the step takes which never ends."""


class Owner:
    """Whose graphs a boundary decides on: one request a step, and what was done before which."""

    def __init__(self, *requests: Vote | Level) -> None:
        self.requests = [w if isinstance(w, Vote) else Vote(w) for w in requests]
        self.done: list[str] = []
        self.votes = Agreement(LONG)
        self.boundary = Boundary(self.votes, self.vote, self.recapture, self.give_up)

    def vote(self) -> Vote:
        return self.requests.pop(0)

    def recapture(self) -> None:
        self.done.append("recapture")

    def give_up(self, decision: Decision) -> None:
        self.done.append(f"give up: {decision.reason()}")

    def run(self) -> list[str]:
        """Train as many steps as there are requests; return what was done and when."""
        while self.requests:
            self.boundary.before_step()
            self.done.append("step")
            self.boundary.after_step()
        return self.done


def test_nothing_is_done_when_nobody_asks(one_rank: None) -> None:
    owner = Owner(KEEP, KEEP, KEEP, KEEP)
    assert owner.run() == ["step"] * 4
    assert owner.votes.time.votes == 4


def test_a_request_is_done_once_and_a_step_later(one_rank: None) -> None:
    owner = Owner(KEEP, RECAPTURE, RECAPTURE, KEEP, KEEP, KEEP)
    assert owner.run() == ["step"] * 3 + ["recapture"] + ["step"] * 3


def test_a_step_that_is_begun_twice_recaptures_once(one_rank: None) -> None:
    owner = Owner(RECAPTURE, KEEP)
    owner.run()
    owner.boundary.before_step()
    owner.boundary.before_step()
    assert owner.done == ["step", "step", "recapture"]


def test_a_request_after_the_recapture_is_a_new_one(one_rank: None) -> None:
    owner = Owner(RECAPTURE, RECAPTURE, RECAPTURE, KEEP, KEEP)
    assert owner.run() == ["step", "step", "recapture", "step", "step", "recapture", "step"]


@pytest.mark.parametrize("requests", [(RECAPTURE, GIVE_UP), (GIVE_UP, RECAPTURE)])
def test_giving_up_comes_before_a_recapture(one_rank: None, requests: tuple[Level, Level]) -> None:
    reason = "give up: rank 0 asked to discard the graphs"
    assert Owner(*requests, KEEP, KEEP, KEEP).run() == ["step", "step", reason, *["step"] * 3]


def test_what_changes_collectives_is_undone_once_all_give_up(one_rank: None) -> None:
    owner = Owner(Vote(GIVE_UP, graphs=1), *[Vote(graphs=1)] * 3)
    owner.votes.undo_together(lambda: owner.done.append("undo"))
    reason = "give up: rank 0 asked to discard the graphs"
    assert owner.run() == ["step", "step", reason, "undo", "step", "step"]


def test_what_changes_collectives_is_undone_once_no_rank_has_graphs(one_rank: None) -> None:
    held, none = Vote(graphs=1), Vote()
    owner = Owner(none, none, held, none, none, none)
    for number in range(6):
        owner.boundary.before_step()
        if number == 2:
            # All capture. Votes of before are of ranks without graphs, and of no account.
            owner.votes.undo_together(lambda: owner.done.append("undo"))
        owner.done.append(f"step {number}")
        owner.boundary.after_step()
    # Step 3 was the first without graphs; it is voted on after it, and known after the next.
    assert owner.done == [*(f"step {number}" for number in range(5)), "undo", "step 5"]


def test_what_a_new_capture_has_changed_outlives_votes_of_before(one_rank: None) -> None:
    held, none = Vote(graphs=1), Vote()
    owner = Owner(none, none, none, held, held, held)
    owner.votes.undo_together(lambda: owner.done.append("undo"))
    for number in range(6):
        owner.boundary.before_step()
        if number == 3:
            owner.votes.undo_together(lambda: owner.done.append("undo the new"))
        owner.boundary.after_step()
    assert owner.done == ["undo"] and owner.votes.left == 2


def test_what_changes_collectives_is_undone_at_the_end_and_once(one_rank: None) -> None:
    votes = Agreement(LONG)
    done: list[str] = []
    for name in ("first", "last"):
        votes.undo_together(partial(done.append, name))
    assert votes.left == 2
    votes.close()
    votes.close()
    assert done == ["last", "first"] and votes.left is None


def test_nothing_is_decided_after_the_close(one_rank: None) -> None:
    owner = Owner(RECAPTURE, RECAPTURE, RECAPTURE)
    for _ in range(2):
        owner.boundary.after_step()
    owner.boundary.close()
    owner.boundary.close()
    owner.boundary.before_step()
    owner.boundary.after_step()
    assert owner.done == [] and len(owner.requests) == 1
    owner.boundary = Boundary(owner.votes, owner.vote, owner.recapture, owner.give_up)
    assert owner.run() == ["step"]


def test_a_boundary_closes_after_the_process_groups(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    owner = Owner(KEEP)
    owner.run()
    dist.destroy_process_group()
    owner.boundary.close()
    assert owner.votes.collect() is None


def test_a_vote_made_within_a_step_does_not_disturb_the_posted_one(one_rank: None) -> None:
    owner = Owner(RECAPTURE, KEEP, KEEP)
    owner.boundary.after_step()
    assert owner.votes.agree(Kind.MISMATCH, Vote()).level is KEEP
    assert owner.run() == ["step", "recapture", "step"]


def decided_together(rank: int) -> Any:
    """Rank 2 asks for a recapture; later rank 1 holds other graphs than the rest."""
    requests = [Vote(RECAPTURE if rank == 2 and step == 1 else KEEP) for step in range(5)]
    requests += [Vote(graphs=1 + (rank == 1)), *[Vote()] * 3]
    return Owner(*requests).run()


def at_other_steps(rank: int) -> Any:
    owner = Owner(KEEP)
    owner.boundary.after_step(10 + (rank == 3))
    try:
        owner.boundary.after_step()
    except AgreementError as error:
        return str(error)
    return "went on"


def closed_alone(rank: int) -> Any:
    """Rank 0 has posted a vote to which the others never come, and closes."""
    owner = Owner(KEEP)
    text = ""
    if rank == 0:
        owner.boundary.after_step()
        with patch.object(boundary, "CLOSING", timedelta(seconds=0.1)):
            owner.boundary.close()
        try:
            owner.votes.ready()
        except AgreementError as error:
            text = str(error)
    dist.barrier()
    return text


def plan() -> Any:
    """Layers as large as the embedding and the output layer together.

    All-gathers of two units that are taken for each other are then of equal size. NCCL does not
    look at sizes, while gloo kills the process when they differ.
    """
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    model = CpuModelConfig(layers=2, graph_modules=("attn",), vocabulary=262, ffn_hidden_size=128)
    return TrainingPlan(model, STEPS, WARMUP)


class Recapturing:
    """A training run in which rank 2 finds, after a step, that it has to capture again."""

    def __init__(self, root: Path, agreed: bool) -> None:
        from megatron_cg.telemetry.record import Recorder
        from megatron_cg.tools.cpu.train import Trainer

        self.trainer = Trainer(plan())
        self.root, self.recorder = root, Recorder(root)
        self.recaptured_before: list[int] = []
        self.number = 0
        self.wanted = False
        self.votes = Agreement(LONG) if agreed else None
        self.boundary = (
            Boundary(self.votes, self.vote, self.recapture, lambda _decision: None)
            if self.votes is not None
            else None
        )

    def vote(self) -> Vote:
        return Vote(RECAPTURE if self.wanted else KEEP)

    def recapture(self) -> None:
        from megatron_cg.backends.tape.tape_backend import TapeBackend

        assert self.trainer.session is not None
        self.trainer.session.close()
        if self.votes is not None:
            self.votes.begin_capture()
        self.trainer.capture(TapeBackend(), self.votes)
        self.wanted = False
        self.recaptured_before.append(self.number)

    def between_steps(self) -> None:
        if self.boundary is not None:
            self.boundary.before_step()
        elif self.wanted:
            self.recapture()

    def run(self) -> None:
        from megatron_cg.backends.tape.tape_backend import TapeBackend

        for self.number in range(STEPS):
            hangs = self.boundary is None and self.number == ASKED + 1
            with cut_off(self.recorder, self.root, self.number) if hangs else nullcontext():
                self.between_steps()
                if self.number == WARMUP:
                    self.trainer.capture(TapeBackend(), self.votes)
                started = time.perf_counter()
                loss, norm = self.trainer.step()
            losses = {"lm loss": torch.tensor(loss, dtype=torch.float64)}
            self.recorder.add_step(losses, norm, False, started)
            self.wanted |= self.number == ASKED and dist.get_rank() == ASKING
            if self.boundary is not None:
                self.boundary.after_step()
        self.finish()

    def finish(self) -> None:
        session = self.trainer.session
        assert session is not None
        self.recorder.note("graphs", session.counters.as_dict())
        self.recorder.note("recaptured_before", self.recaptured_before)
        self.recorder.finish([self.trainer.model])
        if self.boundary is not None:
            self.boundary.close()
        session.close()


@contextmanager
def cut_off(recorder: Any, root: Path, number: int) -> Iterator[None]:
    """End this process, with a note, when the block is not left within the limit.

    It waits for the other ranks' notes: when a rank ends, those that wait for it fail.
    """

    def end() -> None:
        recorder.note("cut_off_in_step", number)
        recorder.begin({})
        while len(list(root.glob("rank*.jsonl"))) < RANKS:
            time.sleep(0.1)
        os._exit(0)

    timer = threading.Timer(LIMIT, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def play(root: Path) -> None:
    """In one process: all that needs four. The run without agreement does not come back."""
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.voting import train

    rank = dist.get_rank()
    for scenario in (decided_together, at_other_steps, closed_alone):
        (root / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(scenario(rank)))
    train(plan(), root / "eager")
    Recapturing(root / "agreed", agreed=True).run()
    parallel_state.destroy_model_parallel()
    Recapturing(root / "alone", agreed=False).run()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("boundary")
    run_processes(partial(play, root), RANKS)
    return root


def told(root: Path, scenario: Callable[[int], Any]) -> list[Any]:
    paths = [root / f"{scenario.__name__}.{rank}.json" for rank in range(RANKS)]
    return [json.loads(path.read_text()) for path in paths]


def test_all_ranks_do_what_one_asks_for_before_the_same_step(played: Path) -> None:
    minority = "give up: rank 1 and the other ranks hold different sets of graphs"
    steps = [*["step"] * 3, "recapture", *["step"] * 4, minority, *["step"] * 2]
    assert told(played, decided_together) == [steps] * RANKS


def test_ranks_at_other_steps_all_end(played: Path) -> None:
    for text in told(played, at_other_steps):
        assert "ranks 0, 1, 2 to step 10 (posted), rank 3 to step 11 (posted)" in text


def test_closing_waits_no_longer_than_its_own_bound_for_ranks_that_never_come(played: Path) -> None:
    assert "(gloo: Operation timed out!)" in told(played, closed_alone)[0]


def test_one_rank_of_four_wants_a_recapture_and_all_recapture(played: Path) -> None:
    from megatron_cg.tools.align.compare import compare, read_run

    agreed = read_run(played / "agreed")
    result = compare(read_run(played / "eager"), agreed)
    assert result.status == "identical", result.reason
    assert [agreed[rank]["recaptured_before"] for rank in range(RANKS)] == [[ASKED + 2]] * RANKS
    assert len(result.values) == RANKS * 2 * STEPS and result.shards > 40
    replays = RANKS * 2 * (STEPS - ASKED - 2)
    assert (result.graphs["captured"], result.graphs["replayed"]) == (RANKS * 2, replays)


def test_without_the_agreement_the_same_run_hangs_and_is_cut_off(played: Path) -> None:
    from megatron_cg.tools.align.compare import read_run

    alone = read_run(played / "alone")
    assert [alone[rank]["cut_off_in_step"] for rank in range(RANKS)] == [ASKED + 1] * RANKS
    assert not any(alone[rank]["finished"] for rank in range(RANKS))
    assert {len(alone[rank]["steps"]) for rank in range(RANKS)} == {ASKED + 1}
