"""Counters in Megatron's log and writers, at Megatron's intervals."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_cg.consensus.exchange import AgreementTime
from megatron_cg.errors import UpstreamChangedError
from megatron_cg.replay.counters import Counters
from megatron_cg.telemetry.step_log import follow_log, log_line, totals


class Helper:
    """What counts, as the capture helper does."""

    def __init__(self) -> None:
        self.counters, self.votes = Counters(), AgreementTime()

    def counted(self) -> tuple[Counters, AgreementTime]:
        return self.counters, self.votes


class Writer:
    """Both kinds of writers: what they are given."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars.append((name, value, iteration))

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.scalars += [(name, value, iteration) for name, value in values.items()]


class Run:
    """Megatron's module with its own functions replaced where they need a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import global_vars, training

        self.module, self.printed = training, list[str]()
        self.tensorboard, self.wandb = Writer(), Writer()
        args = argparse.Namespace(tensorboard_log_interval=2, log_interval=5)
        monkeypatch.setattr(training, "print_rank_last", self.printed.append)
        monkeypatch.setattr(training, "training_log", self.megatrons)
        for name, value in (
            ("get_args", args),
            ("get_tensorboard_writer", self.tensorboard),
            ("get_wandb_writer", self.wandb),
        ):
            monkeypatch.setattr(global_vars, name, lambda value=value: value)

    @staticmethod
    def megatrons(loss_dict: Any, iteration: int, is_first_iteration: bool = False) -> str:
        return "report_memory_flag"

    def step(self, iteration: int) -> None:
        result = self.module.training_log({}, iteration, is_first_iteration=iteration == 1)
        assert result == "report_memory_flag"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_lines_tell_what_is_new_and_writers_all_at_megatrons_intervals(run: Run) -> None:
    helper = Helper()
    before = run.module.training_log
    undo = follow_log([helper])
    for iteration in range(1, 11):
        if iteration == 4:
            helper.counters.captured += 3
        if iteration >= 4:
            helper.counters.count_replay(1, 2, 2**20)
            helper.votes.waiting_ms += 0.5
        run.step(iteration)
    undo()
    undo()
    assert run.module.training_log is before
    assert run.printed == [
        " megatron_cg | captured: 3 | replayed: 2 | eager: 0 | mismatched: 0 | recaptured: 0 | "
        "verified: 0 | copied: 4 tensors, 2.0 MiB | votes (ms): 1.0 |",
        " megatron_cg | captured: 0 | replayed: 5 | eager: 0 | mismatched: 0 | recaptured: 0 | "
        "verified: 0 | copied: 10 tensors, 5.0 MiB | votes (ms): 2.5 |",
    ]
    assert run.tensorboard.scalars == run.wandb.scalars
    replayed = [s for s in run.wandb.scalars if s[0] == "megatron_cg/replayed"]
    assert replayed == [(replayed[0][0], count, step) for step, count in
                        ((2, 0), (4, 1), (6, 3), (8, 5), (10, 7))]  # fmt: skip
    assert {name for name, _, _ in run.wandb.scalars} == {
        f"megatron_cg/{name}"
        for name in (
            *("captured", "replayed", "eager", "mismatched", "recaptured", "verified"),
            *("inputs_copied", "bytes_copied", "waiting_ms"),
        )
    }


def test_ranks_without_writers_and_runs_without_graphs_write_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import global_vars

    for name in ("get_tensorboard_writer", "get_wandb_writer"):
        monkeypatch.setattr(global_vars, name, lambda: None)
    undo = follow_log([Helper()])
    for iteration in range(1, 11):
        run.step(iteration)
    undo()
    assert run.printed == [] and run.tensorboard.scalars == []


def test_without_a_writer_the_interval_of_writers_may_be_none(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import global_vars

    # Megatron divides by it only where there is a writer.
    args = argparse.Namespace(tensorboard_log_interval=0, log_interval=1)
    for name, value in (("args", args), ("tensorboard_writer", None), ("wandb_writer", None)):
        monkeypatch.setattr(global_vars, f"get_{name}", lambda value=value: value)
    undo = follow_log([helper := Helper()])
    helper.counters.captured += 3
    run.step(1)
    undo()
    assert len(run.printed) == 1


def test_another_signature_is_refused_by_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.module, "training_log", lambda losses: None)
    with pytest.raises(UpstreamChangedError, match=r"training_log is not .*iteration"):
        follow_log(())


def test_a_second_capture_and_its_session_are_in_the_totals() -> None:
    one, two = Counters(captured=3, replayed=9), Counters(captured=3, recaptured=1)
    votes = AgreementTime(votes=2, waiting_ms=1.5)
    now = totals([(one, votes), (two, AgreementTime())])
    assert (now["captured"], now["recaptured"], now["waiting_ms"]) == (6, 1, 1.5)
    assert "captured: 6 | replayed: 9" in log_line({}, now)
    assert "captured: 0 | replayed: 0" in log_line(now, now)
