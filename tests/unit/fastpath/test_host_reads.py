"""What Megatron's loop reads in a step: the same numbers, without waiting for the step's end."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.fastpath.host_reads import install_host_reads
from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.telemetry import follow_log

done: list[str] = []


class Stream:
    def wait_event(self, event: Event) -> None:
        done.append(f"wait for {event.name}")


class Event:
    name = "nothing"

    def record(self) -> None:
        self.name = done[-1]


@contextmanager
def on_stream(_: Any) -> Any:
    done.append("beside")
    yield
    done.append("back")


class Optimizer:
    def __init__(self) -> None:
        self.grad_scaler = None
        self._scale_one = torch.tensor([1.0])

    def clip_grad_norm(self, _: float) -> torch.Tensor:
        done.append("clip")
        return torch.tensor([0.1])


class Loop:
    """Functions of Megatron's loop, before and while the part is installed."""

    def __init__(self, training: Any) -> None:
        self.training, self.optimizer = training, Optimizer()
        self.undo = install_host_reads([self.optimizer])
        self.alone: Any = dist.group.WORLD

    def largest(self, number: Any) -> Any:
        reduce = self.training.reduce_max_stat_across_model_parallel_group
        return reduce(number, group=self.alone)

    def stepped(self, made: bool) -> bool:
        reduce = self.training.logical_and_across_model_parallel_group
        return bool(reduce(made, group=self.alone))


@pytest.fixture
def on_gpu(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", on_stream)):
        monkeypatch.setattr(torch.cuda, name, fake)
    done.clear()


@pytest.fixture
def loop(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    from megatron.core.rerun_state_machine import RerunStateMachine
    from megatron.training import training

    def log(loss_dict: Any, total_loss_dict: Any, iteration: int, skipped_iter: int) -> Any:
        return loss_dict, dict(total_loss_dict), iteration, skipped_iter

    for kind in ("logical_and", "reduce_max_stat"):
        name = f"{kind}_across_model_parallel_group"
        monkeypatch.setattr(training, name, lambda number, group=None: f"reduced {number}")
    monkeypatch.setattr(training, "training_log", log)
    monkeypatch.setattr(RerunStateMachine, "_reduce_any", lambda _, value: [not value])
    made = Loop(training)
    yield made
    made.undo()


def test_the_norm_is_read_when_it_is_computed(loop: Loop) -> None:
    norm = loop.optimizer.clip_grad_norm(1.0)
    assert loop.stepped(True) and not loop.stepped(False)
    assert loop.largest(norm) == torch.tensor(0.1).item()
    assert done == ["clip", "wait for clip", "beside", "back"]
    # It is read: what comes then, or without a norm, is Megatron's own.
    assert loop.training.logical_and_across_model_parallel_group(True) == "reduced True"
    assert loop.largest(torch.ones(1)) == "reduced tensor([1.])"


def test_what_the_host_knows_is_rounded_as_on_the_gpu(loop: Loop) -> None:
    assert loop.largest(1e-4) == torch.tensor([1e-4]).item() != 1e-4
    assert loop.largest(None) is None and loop.largest(-1.0) is None
    assert math.isnan(loop.largest(math.nan))
    assert done == []
    reduce = loop.training.reduce_max_stat_across_model_parallel_group
    assert reduce(1e-4) == "reduced 0.0001"
    loop.undo()
    assert reduce is not loop.training.reduce_max_stat_across_model_parallel_group
    assert loop.largest(None) == "reduced None"


def test_losses_are_added_up_without_a_default(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import global_vars

    log, loss = loop.training.training_log, torch.tensor(2.0)
    sums = {"lm loss": torch.tensor([1.0]), "skipped": 0}
    assert log({"lm loss": loss}, sums, 3, skipped_iter=0) == (
        {},
        {"lm loss": torch.tensor([3.0]), "skipped": 0},
        3,
        0,
    )
    # A loss without a sum, one of a step that was skipped, and one that a writer shows.
    for losses, skipped in (({"new": loss}, 0), ({"lm loss": loss}, 1)):
        assert log(losses, sums, 3, skipped)[0] == losses
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", SimpleNamespace())
    assert log({"lm loss": loss}, sums, 3, 0)[0] == {"lm loss": loss}
    assert sums["lm loss"] == 3.0


def test_code_around_the_log_still_gets_the_losses(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper looks like Megatron's function to a check of its source."""
    from megatron.training import training

    got: list[Any] = []

    def log(loss_dict: Any, total_loss_dict: Any, iteration: int, skipped_iter: int) -> None:
        got.append(("Megatron's", dict(loss_dict)))

    @wraps(log)
    def theirs(loss_dict: Any, *others: Any) -> None:
        got.append(("theirs", dict(loss_dict)))
        log(loss_dict, *others)

    losses = {"lm loss": torch.tensor(2.0)}
    for function, ours_sums in ((theirs, False), (log, True)):
        monkeypatch.setattr(training, "training_log", function)
        undo_ours = follow_log(list)
        undo = install_host_reads([Optimizer()])
        sums = {"lm loss": torch.tensor(1.0)}
        training.training_log(losses, sums, 3, 0)
        assert sums["lm loss"] == (3.0 if ours_sums else 1.0)
        undo()
        undo_ours()
    assert got == [("theirs", losses), ("Megatron's", losses), ("Megatron's", {})]


def test_a_request_to_repeat_is_reduced_beside_the_step(loop: Loop) -> None:
    from megatron.core.rerun_state_machine import RerunStateMachine

    machine = RerunStateMachine.__new__(RerunStateMachine)
    assert machine._reduce_any(False) == [True] and done == ["beside", "back"]
    loop.undo()
    assert machine._reduce_any(False) == [True] and len(done) == 2


def test_the_loss_scale_is_known(loop: Loop) -> None:
    scale = loop.optimizer._scale_one
    scale.zero_()
    assert scale.item() == 1.0 and (scale + 1).item() == 1.0
    assert copy.deepcopy(scale).item() == 1.0
    loop.undo()
    assert scale.item() == 0.0
    assert "clip_grad_norm" not in vars(loop.optimizer)


def test_it_is_for_one_optimizer_of_megatron_s_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotApplicableError, match="no GPU"):
        install_host_reads([Optimizer()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chained = Optimizer()
    chained.chained_optimizers = []  # type: ignore[attr-defined]
    no_norm = torch.optim.SGD([torch.zeros(1)])
    for optimizers in ([], [Optimizer()] * 2, [chained], [no_norm]):
        with pytest.raises(NotApplicableError):
            install_host_reads(optimizers)
