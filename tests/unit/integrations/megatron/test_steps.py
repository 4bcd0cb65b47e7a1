"""When a step begins and ends, when it is repeated, and what Megatron's schedule is called with."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.training import training

from megatron_cg.capture.session import Session
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ConfigurationError
from megatron_cg.experts.row_bound import Excess, RowBound
from megatron_cg.integrations.megatron import steps as repeat
from megatron_cg.integrations.megatron.steps import Steps, by_train_step
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.upstream.patch import Undo

pytestmark = pytest.mark.usefixtures("one_rank")


def bound_of(events: list[Any]) -> Any:
    """Stands for a ``RowBound`` that is exceeded in some steps."""
    bound: Any = SimpleNamespace(rows=0, flag="--cg-moe-rows")
    bound.begin_step, bound.share = partial(events.append, "begin"), partial(events.append, "share")
    bound.sharing = partial(RowBound.sharing, bound)
    bound.holds = lambda: not bound.rows
    bound.exceeded = lambda: Excess(bound.rows, 128, 2.0, bound.flag) if bound.rows else None
    return bound


def new_session() -> Session:
    sharding: Any = SimpleNamespace(network=torch.nn.Linear(1, 1))
    return Session(sharding, (), TapeBackend(), Agreement())


class Loop:
    """A model, its helper, and a schedule that does little instead of Megatron's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.bound, self.session = bound_of(self.events), new_session()
        self.fsdp = torch.nn.Linear(1, 1)
        chunk: Any = torch.nn.Linear(1, 1)
        chunk.zero_grad_buffer = lambda: self.events.append("zero")
        self.chunk = chunk
        self.optimizer: Any = SimpleNamespace(
            zero_grad=lambda: self.events.append("optimizer's zero"),
            step=lambda: self.events.append("update"),
        )
        self.controller: Any = SimpleNamespace(session=self.session)
        self.forward: Callable[[Any], Any] = self.take
        fsdp_of = {id(self.chunk): self.fsdp}
        monkeypatch.setattr(repeat, "root_of", lambda model: fsdp_of.get(id(model)))
        experts = SimpleNamespace(bound=self.bound)
        monkeypatch.setattr(repeat, "experts_of", {self.fsdp: experts}.get)
        monkeypatch.setattr(schedules, "forward_backward_no_pipelining", self.schedule())
        self.undo_repeats = repeat.repeat_steps()
        self.undo = self.follow()

    def follow(self) -> Undo:
        steps: Any = SimpleNamespace(number=12, controller=self.controller)
        return repeat.repeat_if_needed([self.chunk], [self.optimizer], steps)

    def schedule(self) -> Any:
        def forward_backward_no_pipelining(
            *,
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            num_microbatches: int,
            forward_only: bool = False,
        ) -> Any:
            policy = self.session.mismatches
            self.events.append("eager" if policy.conditions.all_eager else "graphs")
            self.events.append(policy.conditions.within_row_bound())
            self.session.counters.replayed += not policy.conditions.all_eager
            return [forward_step_func(data_iterator) for _ in range(num_microbatches)]

        return forward_backward_no_pipelining

    def take(self, data_iterator: Any) -> Any:
        one = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        batch = next(one) if one is not None else {}
        self.events.append(dict(batch))
        batch["changed"] = True
        return batch

    def passes(self, data: Any, **options: Any) -> Any:
        given = {"forward_step_func": self.forward, "data_iterator": data, "model": [self.chunk]}
        return get_forward_backward_func(pp_size=1)(**given | {"num_microbatches": 2} | options)

    def step(self, data: Any, **options: Any) -> Any:
        self.chunk.zero_grad_buffer()
        self.events.clear()
        result = self.passes(data, **options)
        self.optimizer.step()
        return result


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    yield loop
    loop.undo()
    loop.undo_repeats()


def batches() -> Iterator[dict[str, int]]:
    return iter([{"tokens": number} for number in range(9)])


@pytest.mark.parametrize("kind", ["none", "list", "list of none"])
def test_ranks_without_batches_and_lists_of_iterators(loop: Loop, kind: str) -> None:
    loop.bound.rows = 200
    data = {"none": None, "list": [batches()], "list of none": [None]}[kind]
    result = loop.step(data, model=loop.chunk)
    assert len(result) == 2 and "eager" in loop.events
    assert [batch.get("tokens") for batch in result] == ([0, 1] if kind == "list" else [None] * 2)


def test_an_iterators_other_members_are_there(loop: Loop) -> None:
    class Data:
        name = "a name"

        def __next__(self) -> dict[str, int]:
            return {}

    seen = []

    def forward(data: Any) -> None:
        next(data)
        seen.append((data.name, iter(data) is data))

    loop.forward = forward
    loop.step(Data())
    assert seen == [("a name", True)] * 2


def test_a_failed_step_leaves_no_mode_behind(loop: Loop) -> None:
    loop.bound.rows = 200

    def fail(data: Any) -> None:
        next(data)
        if loop.session.mismatches.conditions.all_eager:
            raise ValueError("failed")

    loop.forward = fail
    with pytest.raises(ValueError, match="failed"):
        loop.step(batches())
    assert not loop.session.mismatches.conditions.all_eager


@pytest.mark.parametrize("case", ["no graphs", "evaluation", "another model"])
def test_other_passes_are_megatrons_own(loop: Loop, case: str) -> None:
    loop.bound.rows = 200
    if case == "no graphs":
        loop.controller.session = None
    changed: dict[str, dict[str, Any]]
    changed = {"evaluation": {"forward_only": True}, "another model": {"model": loop.fsdp}}
    loop.passes(batches(), **changed.get(case, {}))
    assert loop.events == ["graphs", True, {"tokens": 0}, {"tokens": 1}]


def test_an_unverified_step_returns_its_losses(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.undo()
    monkeypatch.setattr(repeat, "experts_of", lambda _model: None)
    steps: Any = SimpleNamespace(number=12, controller=loop.controller)
    loop.undo = repeat.repeat_if_needed([loop.chunk], [loop.optimizer], steps, verifies=True)
    assert [batch["tokens"] for batch in loop.step(batches())] == [0, 1]


@pytest.mark.parametrize("rows", [0, 200])
@pytest.mark.refuses("repeat-outside-schedule", "repeat-second-call")
def test_a_second_call_for_the_same_gradients_is_refused(loop: Loop, rows: int) -> None:
    loop.bound.rows = rows
    loop.step(batches())
    with pytest.raises(ConfigurationError, match=r"call model\.zero_grad_buffer\(\)") as error:
        loop.passes(batches())
    assert [one.rule for one in error.value.violations] == ["repeat-second-call"]
    loop.chunk.zero_grad_buffer()
    loop.passes(batches())


@pytest.mark.refuses("repeat-outside-schedule", "repeat-second-call")
def test_replays_outside_of_the_schedule_end_before_the_update(loop: Loop) -> None:
    loop.step(batches())
    loop.events.clear()
    loop.session.counters.replayed += 1
    with pytest.raises(ConfigurationError, match="get_forward_backward_func") as error:
        loop.optimizer.step()
    assert [one.rule for one in error.value.violations] == ["repeat-outside-schedule"]
    assert loop.events == []
    loop.controller.session = new_session()
    loop.optimizer.step()
    assert loop.events == ["update"]


def test_batches_that_are_read_elsewhere_end_before_the_update(loop: Loop) -> None:
    others = batches()
    loop.forward = lambda data: next(others)
    with pytest.raises(ConfigurationError, match="data_iterator") as error:
        loop.step(batches())
    assert [one.rule for one in error.value.violations] == ["repeat-batches-elsewhere"]
    assert "update" not in loop.events
    loop.step(None)
    assert loop.events[-1] == "update"


def test_a_schedule_that_is_replaced_twice_runs_a_step_once(loop: Loop) -> None:
    undo = repeat.repeat_steps()
    loop.bound.rows = 200
    loop.step(batches())
    undo()
    assert loop.events.count("begin") == 1 and loop.events.count("eager") == 1
    assert loop.session.counters.repeated == 1


@pytest.mark.parametrize("shares", [False, True])
def test_a_step_inside_of_another_models_forgets_nothing_of_it(loop: Loop, shares: bool) -> None:
    other, outer = torch.nn.Linear(1, 1), SimpleNamespace(running=True, bound=None)
    outer.bound = loop.bound if shares else None
    repeat._repeaters[other] = outer  # type: ignore[assignment]
    loop.step(batches())
    assert loop.events.count("begin") == (not shares)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_what_train_step_does(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
