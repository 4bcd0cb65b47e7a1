"""Steps before the capture are observed from their begin to their end, also one that fails."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.integrations.megatron.steps import Steps, by_train_step
from megatron_cg.upstream.patch import Undo


class Loop:
    """Megatron's training module, whose step is made of ``parts``, and the optimizer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import training

        self.events: list[Any] = []
        self.optimizer: Any = SimpleNamespace(step=lambda: self.events.append("optimizer"))
        self.parts: list[Callable[[], object]] = [self.update]
        self.module: Any = training

        def train_step(optimizer: Any, iteration: int | None = None) -> str:
            for part in self.parts:
                part()
            self.events.append("end")
            return "numbers"

        monkeypatch.setattr(training, "train_step", train_step)
        controller: Any = SimpleNamespace(
            begin_step=lambda: self.events.append("begin"),
            close=lambda: None,
            session=None,
            awaits_capture=True,
        )
        inputs: Any = SimpleNamespace(observe_step=self.observe)
        self.steps = Steps(controller, inputs)

    def observe(self) -> Undo:
        self.events.append("observe")
        return lambda: self.events.append("after")

    def step(self, **options: Any) -> Any:
        return self.module.train_step(self.optimizer, **options)

    def update(self) -> None:
        self.optimizer.step()

    def fail(self) -> None:
        raise ValueError("failed")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    before, step = loop.module.train_step, loop.optimizer.step
    undo = by_train_step(loop.steps, [loop.optimizer])
    yield loop
    undo()
    assert (loop.module.train_step, loop.optimizer.step) == (before, step)


def test_a_step_is_what_train_step_does(loop: Loop) -> None:
    assert loop.step(iteration=7) == "numbers" and loop.steps.number == 8
    assert loop.events == ["begin", "observe", "optimizer", "end", "after"]


def test_a_step_that_fails_is_over_too(loop: Loop) -> None:
    loop.parts.insert(0, loop.fail)
    with pytest.raises(ValueError, match="failed"):
        loop.step()
    assert loop.events == ["begin", "observe", "after"]
