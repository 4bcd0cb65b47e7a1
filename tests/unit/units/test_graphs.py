"""Graphs of plain modules under the standalone package: bit-equal, guarded, undone."""

import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_cg.capture.guarded_capture import GuardedCapture
from megatron_cg.capture.session import open_sessions
from megatron_cg.errors import CaptureError, PhaseError
from megatron_cg.integrations.repeated_step import _saved
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.units.graphs import graph_units
from tests.unit.counted import expect
from tests.unit.units.plain import REPLAYED, ROWS, STEPS, WIDTH, Training, train
from tests.unit.units.sharded import Run, equal, v1_run

pytest.importorskip("megatron_fsdp")


@pytest.fixture
def runs(one_rank: None) -> Iterator[Callable[..., tuple[Run, Run]]]:
    """Makes an eager run and a graphed one; all graphs are closed at the end."""
    made: list[Run] = []

    def make(graphed: dict[str, Any] | None = None, **options: Any) -> tuple[Run, Run]:
        eager, other = v1_run(**options), v1_run(**options)
        other.with_graphs(**(graphed or {}))
        made.append(other)
        return eager, other

    yield make
    for run in made:
        if run.graphs is not None:
            run.graphs.close()
    assert open_sessions() == 0


def train_both(eager: Run, graphed: Run, steps: int) -> None:
    """Steps of both runs, with equal losses and random numbers."""
    for _ in range(steps):
        state = torch.get_rng_state()
        expected, left = eager.step(), torch.get_rng_state()
        torch.set_rng_state(state)
        assert torch.equal(graphed.step(), expected)
        assert torch.equal(torch.get_rng_state(), left)
    assert equal(eager, graphed)


def test_units_are_given_by_class_module_and_name(one_rank: None) -> None:
    run = v1_run()
    layers = list(run.network.layers)
    for units in ([type(layers[0])], layers, [layers[0], "layers.1", "layers.2"]):
        with run.with_graphs(units, fast_path=False) as graphs:
            run.step()
            run.step()
            expect(graphs.counters, captured=3, replayed=3)
            assert graphs.session is not None and graphs.session.fast_path is None


def test_closing_leaves_nothing_behind(one_rank: None) -> None:
    run = v1_run()
    layer = run.network.layers[0]
    before = (dict(vars(layer)), dict(layer._forward_pre_hooks), dict(layer._forward_hooks))
    destroy = torch.distributed.destroy_process_group
    with run.with_graphs() as graphs:
        run.step()
        run.step()
        assert "forward" in vars(layer) and torch.distributed.destroy_process_group is not destroy
    graphs.close()  # again
    after = (dict(vars(layer)), dict(layer._forward_pre_hooks), dict(layer._forward_hooks))
    assert after == before
    assert torch.distributed.destroy_process_group is destroy


def test_a_step_with_the_weights_that_need_a_gradient_comes_before_the_capture() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    captured = []
    with graph_units(model, ["0", "1"], warmup_steps=1, backend="tape") as graphs:
        for _ in range(3):
            with graphs.step():
                captured.append(graphs.session is not None)
                model(torch.ones(2, 4)).sum().backward()
            model[0].weight.requires_grad_(True)
    assert captured == [False, False, True]


def test_a_loop_that_ends_before_the_capture_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with graph_units(model, "0", backend="tape") as graphs:
        for _ in range(2):
            with graphs.step():
                model(torch.ones(2, 4)).sum().backward()
    graphs.close()
    with pytest.raises(ArithmeticError), graph_units(model, "0", backend="tape"):
        raise ArithmeticError
    (told,) = caplog.messages
    assert "the loop had 2 steps in graphs.step(), and the first 3 are eager" in told


def test_counters_are_what_wandb_logs(one_rank: None) -> None:
    with v1_run().with_graphs() as graphs:
        counters = graphs.counters
    # What wandb.log does with them (0.31): names are looked at, then a copy is written to.
    assert isinstance(counters, Mapping) and all(isinstance(name, str) for name in counters)
    row = counters.copy()
    row["_timestamp"] = 0
    assert json.dumps(row) == json.dumps({**counters, "_timestamp": 0})
    assert dict(counters) == counters.as_dict() and len(counters) == len(row) - 1


def test_a_unit_has_graphs_of_one_session(one_rank: None) -> None:
    run = v1_run()
    with run.with_graphs(["layers.0", "layers.1"]) as first:
        run.step()
        run.step()
        second = graph_units(run.model, ["layers.1", "layers.2"], warmup_steps=1, backend="tape")
        with second.step():
            run.step()
        with pytest.raises(PhaseError, match=r"layers\.1 has graphs"), second.step():
            pass
        second.close()
        run.step()
        expect(first.counters, replayed=2 * 3, eager=0, mismatched=0)


class Broken(TapeBackend):
    """Fails at the end of its capture."""

    def capture(self, *args: Any, **kwargs: Any) -> Any:
        super().capture(*args, **kwargs)
        raise MemoryError("no room")


def test_a_failed_capture_goes_on_eagerly_where_asked_for(runs: Any) -> None:
    """Then nothing that was observed for the capture is kept."""
    eager, graphed = runs({"backend": Broken(), "on_failure": "eager"})
    train_both(eager, graphed, 1)
    calls = [weakref.ref(call) for call in graphed.graphs._observer.calls.values()]
    assert calls and all(call() is not None for call in calls)
    train_both(eager, graphed, 2)
    gc.collect()
    assert all(call() is None for call in calls)
    expect(graphed.graphs.counters, captured=0, replayed=0)
    assert graphed.graphs.session is None


@pytest.mark.parametrize("backend", [TapeBackend, Broken])
def test_accumulators_of_a_capture_do_not_outlive_it(
    one_rank: None, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to the capture stream, so a gradient might be reduced before it is there."""
    run = v1_run()
    held: list[tuple[torch.Tensor, Any]] = []

    ended = GuardedCapture._pass_ended

    def hold(self: Any, index: int, forward: bool, warmup: bool) -> None:
        ended(self, index, forward, warmup)
        # As a module that keeps its last output, which keeps the nodes of the weights before it.
        if forward:
            weights = run.network.layers.parameters()
            held.extend((weight, get_gradient_edge(weight).node) for weight in weights)

    monkeypatch.setattr(GuardedCapture, "_pass_ended", hold)
    with run.with_graphs(backend=backend(), on_failure="eager"):
        run.step()
        run.step()
    assert held
    with torch.enable_grad():
        assert not any(get_gradient_edge(weight).node is node for weight, node in held)


def test_a_failed_capture_ends_the_run_otherwise(runs: Any) -> None:
    _, graphed = runs({"backend": Broken()})
    graphed.step()
    with pytest.raises(CaptureError, match="MemoryError: no room"):
        graphed.step()
    assert all("forward" not in vars(layer) for layer in graphed.network.layers)


def test_a_step_that_raised_is_not_observed(runs: Any) -> None:
    eager, graphed = runs({"warmup_steps": 2})
    train_both(eager, graphed, 1)
    for raised in range(2):
        graphed.network.order = [2] if raised else [2, 1, 0]
        with pytest.raises(ZeroDivisionError), graphed.graphs.step():
            graphed.loss()
            raise ZeroDivisionError
    graphed.network.order = None
    train_both(eager, graphed, 1)
    expect(graphed.graphs.counters, captured=0)
    train_both(eager, graphed, 1)
    expect(graphed.graphs.counters, captured=3, replayed=3, mismatched=0)


def test_a_report_says_which_of_several_models_has_the_unit(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        for run in (Training(), Training()):
            graphs = stack.enter_context(run.graphs())
            assert len(list(run.run(graphs))) == STEPS * 6 + 4
            with graphs.step():
                train(run, torch.randn(ROWS + 1, WIDTH))
    first, second = (text for text in caplog.messages if "no replay of 0" in text)
    assert first != second and re.search(r"no replay of 0 of capture \d+ \(ModuleList\):", second)


class Waits(TapeBackend):
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("saves", [False, True])
def test_a_model_that_is_dropped_is_freed_after_the_last_replay(
    saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its state is saved in each step, as with a bound of rows."""
    # What closes graphs at the end of a process stays until then, and holds no model.
    closing = "megatron_cg.units.graphs.graphs_close_in_time"
    monkeypatch.setattr(closing, lambda: lambda: None)
    gc.collect()
    assert not open_sessions()
    backend, training = Waits(), Training()
    made = training.graphs(backend=backend)
    assert list(training.run(made)) and made.counters.replayed == REPLAYED
    waits, model = backend.waits, training.model
    if saves and made.session is not None:
        assert _saved(made.session, again=True) is made.session.step_state
    dropped = weakref.ref(model), weakref.ref(model[0].cuda_graphs[0].graph)
    del training, made
    gc.collect()
    assert open_sessions() == 1
    del model
    gc.collect()
    assert [one() for one in dropped] == [None, None] and not open_sessions()
    # The GPU might still have been in a replay.
    assert backend.waits == waits + 1
