"""Steps before the capture are observed from their begin to their end, also one that fails."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.integrations.megatron.steps import Steps, by_train_step
from megatron_cg.upstream.patch import Undo


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_what_train_step_does(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    events: list[str] = []
    optimizer: Any = SimpleNamespace(step=lambda: events.append("optimizer"))

    def train_step(optimizer: Any, iteration: int | None = None) -> str:
        if fails:
            raise ValueError("failed")
        optimizer.step()
        events.append("end")
        return "numbers"

    def observe() -> Undo:
        events.append("observe")
        return lambda: events.append("after")

    monkeypatch.setattr(training, "train_step", train_step)
    made: dict[str, Any] = {"begin_step": lambda: events.append("begin"), "close": lambda: None}
    controller: Any = SimpleNamespace(**made, session=None, awaits_capture=True)
    inputs: Any = SimpleNamespace(observe_step=observe)
    steps, own = Steps(controller, inputs), optimizer.step
    undo = by_train_step(steps, [optimizer])
    with pytest.raises(ValueError, match="failed") if fails else nullcontext():
        assert training.train_step(optimizer, iteration=7) == "numbers" and steps.number == 8
    assert events == ["begin", "observe", *([] if fails else ["optimizer", "end"]), "after"]
    undo()
    assert (training.train_step, optimizer.step) == (train_step, own)
