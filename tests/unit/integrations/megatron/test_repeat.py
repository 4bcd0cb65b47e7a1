"""When a step is repeated, and what Megatron's functions are called with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.events import StepRepeated, emit, subscribe
from megatron_cg.integrations.megatron.repeat import repeat_steps
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.mismatch_policy import MismatchPolicy, ReplayPolicy

pytestmark = pytest.mark.usefixtures("one_rank")


class Bound:
    """Stands for a ``RowBound`` that is exceeded in some steps."""

    bound = 128

    def __init__(self, events: list[Any]) -> None:
        self.events, self.rows = events, 0

    def begin_step(self) -> None:
        self.events.append("begin")

    def share(self) -> None:
        self.events.append("share")

    def exceeded(self) -> int:
        return self.rows

    def enough(self, rows: int) -> float:
        return rows / 100

    def holds(self) -> bool:
        return not self.rows


class Session:
    def __init__(self) -> None:
        self.mismatches = MismatchPolicy(ReplayPolicy(), Counters())


class Loop:
    """Megatron's training module with a ``train_step`` that does little."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import training

        self.events: list[Any] = []
        self.module: Any = training
        self.bound, self.session = Bound(self.events), Session()
        self.helper = SimpleNamespace(session=self.session)
        chunk: Any = torch.nn.Linear(1, 1)
        chunk.zero_grad_buffer = lambda: self.events.append("zero")
        self.chunk = chunk
        self.optimizer = SimpleNamespace(zero_grad=lambda: self.events.append("optimizer's zero"))
        self.forward: Callable[[Any], Any] = self.take
        self.microbatches, self.given = 2, {"seq_length": 7}

        def train_step(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            opt_param_scheduler: Any,
            config: Any,
            forward_backward_func: Any,
            iteration: int | None = None,
        ) -> Any:
            return forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                num_microbatches=self.microbatches,
                **self.given,
            )

        monkeypatch.setattr(training, "train_step", train_step)
        bound: Any = self.bound
        self.undo = repeat_steps([self.helper], bound)

    def passes(self, forward_step_func: Any, data_iterator: Any, **given: Any) -> Any:
        policy = self.session.mismatches
        self.events.append("eager" if policy.repeats else "graphs")
        self.events.append(policy.numbers_hold())
        return [forward_step_func(data_iterator) for _ in range(given["num_microbatches"])]

    def take(self, data_iterator: Any) -> Any:
        one = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        batch = next(one) if one is not None else {}
        self.events.append(dict(batch))
        batch["changed"] = True
        return batch

    def step(self, data: Any, **options: Any) -> Any:
        self.events.clear()
        args = (self.forward, data, [self.chunk], self.optimizer, None, None)
        return self.module.train_step(*args, self.passes, **options)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    yield loop
    loop.undo()


def batches() -> Iterator[dict[str, int]]:
    return iter([{"tokens": number} for number in range(9)])


def test_a_step_within_the_bound_runs_once(loop: Loop) -> None:
    loop.step(batches())
    assert loop.events == ["begin", "graphs", True, {"tokens": 0}, {"tokens": 1}, "share"]
    assert loop.session.mismatches.counters.repeated == 0


def test_a_step_beyond_it_runs_once_more_eagerly_with_the_same_batches(loop: Loop) -> None:
    loop.bound.rows = 200
    heard: list[Any] = []
    undo = subscribe(heard.append)
    data = batches()
    result = loop.step(data, iteration=11)
    undo()
    first = ["begin", "graphs", False, {"tokens": 0}, {"tokens": 1}, "share"]
    again = ["zero", "optimizer's zero", "eager", True, {"tokens": 0}, {"tokens": 1}]
    assert loop.events == [*first, *again]
    assert [batch["tokens"] for batch in result] == [0, 1] and next(data) == {"tokens": 2}
    assert heard == [StepRepeated(12, 200, 128, 2.0)]
    policy = loop.session.mismatches
    assert policy.counters.repeated == 1 and not policy.repeats and policy.numbers_hold()


@pytest.mark.parametrize("kind", ["none", "list", "list of none"])
def test_ranks_without_batches_and_lists_of_iterators(loop: Loop, kind: str) -> None:
    loop.bound.rows = 200
    data = {"none": None, "list": [batches()], "list of none": [None]}[kind]
    result = loop.step(data)
    assert len(result) == 2
    assert [batch.get("tokens") for batch in result] == ([0, 1] if kind == "list" else [None] * 2)


def test_an_iterators_other_members_are_there(loop: Loop) -> None:
    class Data:
        name = "a name"

        def __next__(self) -> dict[str, int]:
            return {}

    found = []
    loop.forward = lambda data: found.append((data.name, iter(data) is data))
    loop.step(Data())
    assert found == [("a name", True)] * 2


def test_a_failed_step_leaves_no_mode_behind(loop: Loop) -> None:
    loop.bound.rows = 200

    def fail(data: Any) -> None:
        if loop.session.mismatches.repeats:
            raise ValueError("failed")

    loop.forward = fail
    with pytest.raises(ValueError, match="failed"):
        loop.step(batches())
    assert not loop.session.mismatches.repeats


def test_the_function_may_be_given_by_name(loop: Loop) -> None:
    loop.bound.rows = 200
    args = (loop.forward, batches(), [loop.chunk])
    rest = {"optimizer": loop.optimizer, "opt_param_scheduler": None, "config": None}
    loop.module.train_step(*args, forward_backward_func=loop.passes, **rest)
    assert "eager" in loop.events


def test_without_graphs_the_step_is_megatrons(loop: Loop) -> None:
    loop.helper.session = None
    loop.step(batches())
    assert loop.events == ["graphs", True, {"tokens": 0}, {"tokens": 1}]


def test_the_undo_puts_back_megatrons_function(loop: Loop) -> None:
    loop.undo()
    loop.bound.rows = 200
    loop.step(batches())
    assert "eager" not in loop.events and "begin" not in loop.events


def test_the_log_and_the_record_tell_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_cg.telemetry.capture_report import follow_captures
    from megatron_cg.telemetry.record import Recorder, recording

    follow_captures()
    recorder = Recorder(tmp_path)
    with recording(recorder):
        emit(StepRepeated(12, 10240, 9216, 1.4))
    (text,) = caplog.messages
    assert (
        "step 12 repeated: a rank had 10,240 rows for another in a MoE layer, bound 9,216" in text
    )
    assert "--cg-moe-rows 1.4 or more" in text
    recorder.write()
    (event,) = json.loads((tmp_path / "rank0.json").read_text())["events"]
    assert "step 12 repeated" in event["text"]
