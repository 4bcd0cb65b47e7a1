"""Ranks vote as the optimizer's step returns, while the GPU is still at work on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_cg.integrations.megatron.steps import StepRoutine, follow_steps


class Optimizer:
    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def step(self) -> str:
        self.events.append("optimizer")
        return "updated"


class Routine:
    """Notes what it is called for, instead of a ``StepRoutine``."""

    def __init__(self, events: list[Any]) -> None:
        self.before_step = lambda done: events.append(("before", done))
        self.after_step = lambda: events.append("after")
        self.vote = lambda step: events.append(("vote", step))
        self.close = lambda: None


class Loop:
    """Megatron's training module, whose step is made of ``parts``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import training

        self.events: list[Any] = []
        self.optimizer = Optimizer(self.events)
        self.parts: list[Callable[[], object]] = [self.update]
        self.module: Any = training

        def train_step(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            opt_param_scheduler: Any,
            config: Any,
            forward_backward_func: Any,
            iteration: int | None = None,
        ) -> str:
            for part in self.parts:
                part()
            self.events.append("end")
            return "numbers"

        monkeypatch.setattr(training, "train_step", train_step)
        routines = (Routine(self.events), None)
        helpers: list[Any] = [SimpleNamespace(steps=one, undo=ExitStack()) for one in routines]
        self.undo = follow_steps(helpers)

    def step(self, **options: Any) -> Any:
        return self.module.train_step(1, 2, 3, self.optimizer, 5, 6, 7, **options)

    def update(self) -> None:
        self.optimizer.step()

    def fail(self) -> None:
        raise ValueError("failed")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    yield loop
    loop.undo()
    assert vars(loop.optimizer).keys() == {"events"}


def test_the_vote_comes_with_the_optimizers_step_and_once(loop: Loop) -> None:
    loop.parts *= 2
    assert loop.step(iteration=7) == "numbers"
    vote = ("vote", 7)
    assert loop.events == [("before", 7), "optimizer", vote, "optimizer", "end", "after"]
    assert loop.optimizer.step() == "updated"
    assert loop.events[-1] == "optimizer"


def test_a_step_without_the_optimizers_is_voted_on_at_its_end(loop: Loop) -> None:
    loop.parts.clear()
    loop.step()
    assert loop.events == [("before", None), "end", "after", ("vote", None)]


def test_the_optimizer_may_be_given_by_name(loop: Loop) -> None:
    rest = {"opt_param_scheduler": 5, "config": 6, "forward_backward_func": 7}
    loop.module.train_step(1, 2, 3, optimizer=loop.optimizer, **rest)
    assert loop.events == [("before", None), "optimizer", ("vote", None), "end", "after"]


def test_nothing_is_voted_on_before_a_failure(loop: Loop) -> None:
    loop.parts.insert(0, loop.fail)
    with pytest.raises(ValueError, match="failed"):
        loop.step()
    assert loop.events == [("before", None), "after"]


def test_a_failure_after_the_vote_adds_none(loop: Loop) -> None:
    loop.parts.append(loop.fail)
    with pytest.raises(ValueError, match="failed"):
        loop.step()
    assert loop.events == [("before", None), "optimizer", ("vote", None), "after"]


def test_an_optimizers_step_is_wrapped_once_for_all_steps(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.step()
    ours = loop.optimizer.step
    loop.step()
    assert loop.optimizer.step is ours
    beneath = loop.optimizer.step

    def theirs() -> str:
        loop.events.append("theirs")
        return beneath()

    loop.optimizer.step = theirs  # type: ignore[method-assign]
    loop.events.clear()
    loop.step(iteration=3)
    assert loop.events == [("before", 3), "theirs", "optimizer", ("vote", 3), "end", "after"]
    loop.undo()
    assert loop.optimizer.step is theirs
    loop.events.clear()
    loop.optimizer.step()
    assert loop.events == ["theirs", "optimizer"]
    assert "Optimizer.step is left as it is" in caplog.text
    del loop.optimizer.step


def test_a_routine_knows_the_number_of_its_step() -> None:
    controller = SimpleNamespace(before_step=lambda: None, session=None, awaits_capture=False)
    routine = StepRoutine(cast(Any, controller), cast(Any, None))
    assert routine.number is None
    routine.before_step(4)
    assert routine.number == 5
    routine.before_step(None)
    assert routine.number is None
