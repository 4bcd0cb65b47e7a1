"""When the step of an optimizer is captured, replayed, or run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg.arguments import Environment, GraphArguments, RunArguments
from megatron_cg.arguments.validation import violations
from megatron_cg.consensus import exchange
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.integrations.megatron.optimizer_graph import (
    OptimizerGraph,
    capturable_adam,
    follow_optimizer_graph,
)
from tests.unit.ranks import on_ranks

WARMUP = 3
Made = tuple[OptimizerGraph, Any, Callable[[], None]]
"""The graph, the optimizer, and the undo."""


class Optimizer(torch.optim.AdamW):
    """Counts its steps; Megatron's has the same members."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        super().step(closure)
        return self.steps


class Replayed:
    """Takes the role of a CUDA graph: it only counts its replays."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


class Session:
    """Runs what is to be done when it closes."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []
        self.on_close = self.undo.append

    def close(self) -> None:
        for undo in self.undo:
            undo()


@contextmanager
def followed_optimizer(votes: Agreement) -> Iterator[Made]:
    """An optimizer of one weight, as Megatron wraps it, and its graph, which is followed."""
    from megatron.core.optimizer import optimizer_cuda_graph as megatrons

    @contextmanager
    def graph(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Replayed)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        for name in ("get_graph_pool", "get_shared_capture_stream"):
            patch.setattr(megatrons, name, lambda *_: None)
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer: Any = Optimizer([{"params": [weight], "lr": torch.tensor(1e-3)}])
        weight.grad = torch.ones(4)
        kind = megatrons.OptimizerCudaGraphWrapper
        patch.setattr(kind, "curr_iteration", 0)
        optimizer.step = kind(optimizer.step, cuda_graph_warmup_steps=WARMUP)
        settings = SimpleNamespace(fsdp_all_gather_in_start_param_sync=True)
        followed, undo = follow_optimizer_graph([optimizer], settings, votes)
        assert followed is not None
        assert not settings.fsdp_all_gather_in_start_param_sync
        yield followed, optimizer, undo
        undo()
        assert settings.fsdp_all_gather_in_start_param_sync
        followed.release()


@pytest.fixture
def votes(one_rank: None) -> Iterator[Agreement]:
    made = Agreement()
    yield made
    made.close()


@pytest.fixture
def made(votes: Agreement) -> Iterator[Made]:
    with followed_optimizer(votes) as found:
        yield found


def graph_of(optimizer: Any) -> Any:
    return type(optimizer.step).cuda_graph


def test_the_step_is_captured_once_and_replayed_while_the_layers_have_graphs(made: Any) -> None:
    followed, optimizer, _ = made
    for _ in range(WARMUP + 2):
        optimizer.step()
    assert (optimizer.steps, graph_of(optimizer)) == (WARMUP + 2, None)
    session = Session()
    followed.follow(session)
    # A replay returns what the step returned when it was captured.
    assert [optimizer.step() for _ in range(3)] == [WARMUP + 3] * 3
    captured = graph_of(optimizer)
    assert (optimizer.steps, captured.replays) == (WARMUP + 3, 3)
    session.close()
    assert graph_of(optimizer) is None
    optimizer.step()
    assert (optimizer.steps, captured.replays) == (WARMUP + 4, 3)
    followed.follow(Session())
    optimizer.step()
    optimizer.step()
    assert (optimizer.steps, graph_of(optimizer).replays, captured.replays) == (WARMUP + 5, 2, 3)


def test_the_first_step_is_never_captured(made: Any) -> None:
    followed, optimizer, _ = made
    followed.follow(Session())
    optimizer.step()
    assert (optimizer.steps, graph_of(optimizer)) == (1, None)
    optimizer.step()
    assert graph_of(optimizer).replays == 1


def new_gradient(_optimizer: Any, weight: torch.nn.Parameter) -> None:
    weight.grad = torch.full((4,), 2.0)


def no_gradient(_optimizer: Any, weight: torch.nn.Parameter) -> None:
    weight.grad = None


def new_decoupled_gradient(_optimizer: Any, weight: Any) -> None:
    weight.decoupled_grad = torch.full((4,), 2.0)


def new_weights(_optimizer: Any, weight: torch.nn.Parameter) -> None:
    weight.data = weight.data.clone()


def new_rate(optimizer: Any, _weight: torch.nn.Parameter) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)


def another_decay(optimizer: Any, _weight: torch.nn.Parameter) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def loaded_state(optimizer: Any, weight: torch.nn.Parameter) -> None:
    optimizer.state[weight]["exp_avg"] = torch.zeros(4)


@pytest.mark.parametrize(
    "change",
    [
        *(new_gradient, no_gradient, new_decoupled_gradient),
        *(new_weights, new_rate, another_decay, loaded_state),
    ],
)
def test_a_step_that_reads_something_else_runs_eagerly(
    change: Callable[[Any, Any], None], made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    followed, optimizer, _ = made
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.step()
    followed.follow(Session())
    optimizer.step()
    kept = [weight.grad, weight.data, *optimizer.state[weight].values()]  # so that none is reused
    change(optimizer, weight)
    optimizer.step()
    assert len(caplog.messages) == 1
    optimizer.step()
    assert (optimizer.steps, graph_of(optimizer).replays, followed.eager_steps) == (4, 1, 2)
    (message,) = caplog.messages
    assert "the optimizer's step runs eagerly" in message
    assert kept


def steps_of(optimizer: Any, number: int) -> list[str]:
    """What each step came to."""
    found = []
    for _ in range(number):
        try:
            optimizer.step()
            found.append("went on")
        except ReplayMismatchError as error:
            found.append(str(error))
    return found


def leave_together() -> list[str]:
    """Both ranks have another weight decay than at capture, and then no graph."""
    rank, votes = dist.get_rank(), Agreement()
    with followed_optimizer(votes) as (followed, optimizer, _):
        session = captured(followed, optimizer)
        optimizer.param_groups[0]["weight_decay"] = 0.5
        found = steps_of(optimizer, 2)
        session.close()
        found += steps_of(optimizer, 1)
        votes.together()  # as after the decision of all ranks
        found += steps_of(optimizer, 1 + rank)
    dist.barrier()
    votes.close()
    return found


def leave_alone(why: str) -> list[str]:
    """Rank 1 has another weight decay than at capture, or no graph."""
    rank, votes = dist.get_rank(), Agreement()
    exchange.FALLING_BACK = timedelta(seconds=1)
    with followed_optimizer(votes) as (followed, optimizer, _):
        session = captured(followed, optimizer)
        if rank == 1 and why == "decay":
            optimizer.param_groups[0]["weight_decay"] = 0.5
        elif rank == 1:
            session.close()
        found = steps_of(optimizer, 1)
    dist.barrier()
    votes.close()
    return found


def captured(followed: OptimizerGraph, optimizer: Any) -> Session:
    optimizer.step()
    session = Session()
    followed.follow(session)
    optimizer.step()
    return session


def test_ranks_leave_the_graph_of_the_step_together() -> None:
    assert on_ranks(leave_together) == [["went on"] * 4, ["went on"] * 5]


@pytest.mark.parametrize("why", ["decay", "deleted"])
def test_a_rank_that_would_leave_the_graph_of_the_step_alone_ends(why: str) -> None:
    first, (error,) = on_ranks(partial(leave_alone, why))
    assert first == ["went on"]
    assert "cannot replay the optimizer's step" in error
    assert "Leave out --optimizer-cuda-graph" in error


def test_steps_are_megatrons_own_and_eager_once_graphs_are_disabled(
    made: Made,
) -> None:
    _, optimizer, undo = made
    optimizer.step()
    undo()
    for _ in range(WARMUP + 2):
        optimizer.step()
    assert (optimizer.steps, graph_of(optimizer)) == (WARMUP + 3, None)


def test_other_calls_and_other_wrappers_are_left_to_megatron(made: Made) -> None:
    _, optimizer, _ = made
    for given in ({"closure": None}, {}):
        with pytest.raises(AssertionError, match="does not accept"):
            optimizer.step(*([] if given else [None]), **given)
    assert not optimizer.steps
    other = type(optimizer.step)(lambda: "its own step", cuda_graph_warmup_steps=9)
    assert other() == "its own step"
    assert not optimizer.steps


def test_an_optimizer_without_a_graph_is_left_alone() -> None:
    optimizer = Optimizer([torch.nn.Parameter(torch.ones(1))])
    settings = SimpleNamespace(fsdp_all_gather_in_start_param_sync=True)
    followed, undo = follow_optimizer_graph([optimizer], settings, Agreement())
    undo()
    assert followed is None and settings.fsdp_all_gather_in_start_param_sync


def test_adam_of_an_eager_run_can_compute_as_in_a_graph(imported: None) -> None:
    from megatron.core import optimizer

    def capturable() -> bool:
        made = optimizer.Adam([torch.nn.Parameter(torch.ones(1))], capturable=False)
        return bool(made.defaults["capturable"])

    undo = capturable_adam()
    assert capturable()
    undo()
    assert not capturable()


def test_that_flag_is_for_runs_without_graphs_too() -> None:
    flags = GraphArguments(cg_capturable_adam=True)
    assert violations(RunArguments(), flags, Environment()) == ()
