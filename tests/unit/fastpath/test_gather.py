"""Unsharding with fewer calls: collectives, waits and frees are Megatron-FSDP's, in its order.

The next unit is gathered after the launch of a graph.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.fastpath.gather import (
    CachedParameters,
    DeferredPrefetch,
    _fetched,
    _gathered,
    install_unshard,
)
from megatron_cg.tape import fakes
from megatron_cg.tape.train import build
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.functional.loops import RECOMPUTE
from tests.unit.ranks import on_ranks
from tests.unit.trainers import UNPOOLED, trainer_of

Events = list[tuple[Any, ...]]
GATHER = "gather"
RECOMPUTED = {"cuda_graph_impl": "none", "cuda_graph_modules": [], **RECOMPUTE}
SCENARIOS: dict[str, dict[str, Any]] = {
    "experts": {"experts": 4},
    "no double buffer": {"fsdp_options": UNPOOLED},
    "recomputed": {"options": RECOMPUTED},
    "no overlap": {"fsdp_options": {"overlap_param_gather": False}},
    "ZeRO-2": {"fsdp_options": {"data_parallel_sharding_strategy": "optim_grads"}},
}


def trained(options: dict[str, Any], *, short: bool) -> Any:
    """Numbers of a run with an evaluation and a checkpoint, and what it did with buckets."""
    shape = CpuModelConfig(layers=3, hidden_size=16, ffn_hidden_size=16, **options)
    with trainer_of(shape, microbatches=2) as trainer:
        fsdp = trainer.model.module
        numbers: list[Any] = [trainer.step()]
        undo = ExitStack()
        events: Events = []
        with undo, recorded(fsdp, events):
            if short:
                undo.callback(install_unshard(fsdp, DeferredPrefetch()))
            numbers += [trainer.step(), evaluated(trainer), trainer.step()]
            # A forward pass that no backward pass follows, and weights that change after it.
            numbers += [float(trainer._forward().double().sum()), changed(trainer)]
            numbers += [len(fsdp.state_dict()), trainer.step()]
        states = sorted({str(module._training_state) for module in fsdp.module.modules()})
        numbers += [trainer.step(), states]
        return {"numbers": numbers, "events": events}


def evaluated(trainer: Any) -> float:
    """The loss of one forward pass, ended as Megatron ends those of an evaluation."""
    with torch.no_grad():
        loss = float(trainer._forward().double().sum())
    trainer.model.synchronize_param_gather()
    return loss


def changed(trainer: Any) -> float:
    for group in trainer.model.module.param_and_grad_buffer.parameter_groups:
        for buffer in (group.model_weight_buffer, group.main_weight_buffer):
            if buffer is not None:
                buffer.data.mul_(1.25)
    return evaluated(trainer)


@contextmanager
def recorded(fsdp: Any, events: Events) -> Iterator[None]:
    """Note each coalesced collective, each wait for one, and each bucket of weights freed."""
    groups: dict[str, int] = {}

    def number_of(group: Any) -> int:
        return groups.setdefault(group.group_name, len(groups))

    def noting(
        target: Any, name: str, note: Callable[..., tuple[Any, ...]], called: str | None = None
    ) -> None:
        original = getattr(target, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append((called or name, *note(*args)))
            return original(*args, **kwargs)

        patch.setattr(target, name, noted)

    def sizes(group: Any, outputs: Any, inputs: Any, *_: Any) -> tuple[Any, ...]:
        return (number_of(group), *([t.numel() for t in tensors] for tensors in (outputs, inputs)))

    def single(group: Any, output: Any, source: Any, *_: Any) -> tuple[Any, ...]:
        return sizes(group, [output], [source])

    with pytest.MonkeyPatch.context() as patch:
        noting(dist.ProcessGroup, "reduce_scatter_tensor_coalesced", sizes)
        # Of one bucket alone, the two are the same collective.
        noting(dist.ProcessGroup, "allgather_into_tensor_coalesced", sizes, GATHER)
        noting(dist.ProcessGroup, "_allgather_base", single, GATHER)
        noting(dist.Work, "wait", lambda _work: ())
        for number, group in enumerate(fsdp.param_and_grad_buffer.parameter_groups):
            noting(group.model_weight_buffer, "free_bucket_storage", lambda n=number: (n,))
        yield


def train_all() -> dict[str, Any]:
    return {
        name: {"own": trained(options, short=False), "short": trained(options, short=True)}
        for name, options in SCENARIOS.items()
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("name", SCENARIOS)
def test_collectives_waits_and_frees_are_megatrons_own(
    results: list[dict[str, Any]], name: str
) -> None:
    for found in results:
        runs = found[name]
        assert runs["short"]["numbers"] == runs["own"]["numbers"]
        assert runs["short"]["events"] == runs["own"]["events"]
        kinds = {event[0] for event in runs["own"]["events"]}
        assert {GATHER, "wait"} <= kinds
        assert "free_bucket_storage" in kinds or name == "ZeRO-2"


class Stream(fakes.FakeStream):
    def __init__(self, events: list[Any], name: str) -> None:
        super().__init__()
        self.events, self.name = events, name

    def __enter__(self) -> Any:
        self.events.append(f"on {self.name}")

    def wait_event(self, event: object) -> None:
        self.events.append(f"{self.name} waits")


class Pipeline:
    """Megatron-FSDP's, which notes what it is asked for; the units are 0 to 2."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import (
            param_and_grad_buffer as upstream,
        )

        self.orders: Any = upstream.PrefetchOrder
        self.events: list[Any] = []
        self.fsdp, self.own = model.module, model.module.all_gather_pipeline
        groups = self.own.buffer.parameter_groups
        assert [group.fsdp_unit_id for group in groups] == [None, 0, 1, 2]
        self.units = [nn.ParameterList(group.params) for group in groups[1:]]
        monkeypatch.setitem(vars(self.own), "all_gather_params", self.asked)
        monkeypatch.setattr(self.own, "ag_stream", Stream(self.events, "its stream"))
        monkeypatch.setattr(self.own, "async_bucket_gather", lambda *key: self.events.append(key))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(self.events, "a stream"))
        self.deferred = DeferredPrefetch()
        self.undo = self.deferred.install(self.fsdp, self.units[:2])

    def asked(self, params: Any, prefetch: bool = False, **_options: Any) -> None:
        unit = next(n for n, unit in enumerate(self.units) if params[0] is unit[0])
        self.events.append((unit, prefetch))

    def ask(self, unit: int, **options: Any) -> list[Any]:
        forward = {"prefetch": True, "prefetch_order": self.orders.FORWARD_PASS_ORDER}
        self.own.all_gather_params(list(self.units[unit]), **forward | options)
        return self.happened()

    def happened(self) -> list[Any]:
        found, self.events[:] = list(self.events), []
        return found


@pytest.fixture
def pipeline(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    made = Pipeline(build(CpuModelConfig(layers=3, hidden_size=16)), monkeypatch)
    yield made
    made.undo()
    assert made.own.all_gather_params == made.asked


@pytest.mark.parametrize("coalesced", [False, True])
def test_the_next_unit_is_gathered_once_a_graph_is_launched_or_another_unit_is_asked_for(
    coalesced: bool, pipeline: Pipeline
) -> None:
    if coalesced:
        pipeline.own.bucket_to_bucket_group = dict.fromkeys(range(4), 0)
    assert pipeline.ask(0) == [(0, False)]
    pipeline.deferred.launched()
    # For what the unit before has launched, and not for the graph itself.
    alone = ["its stream waits", "on its stream", (1, False), (2, False)]
    together = ["a stream waits", "on a stream", (0, True)]
    assert pipeline.happened() == (together if coalesced else alone)
    pipeline.deferred.launched()
    assert pipeline.happened() == []
    assert pipeline.ask(1) == [(1, False)]
    assert pipeline.ask(2) == [(1, True), (2, True)]


def test_a_held_gather_is_issued_once_or_forgotten_with_its_pass(pipeline: Pipeline) -> None:
    pipeline.ask(0)
    pipeline.deferred.issue()
    pipeline.deferred.launched()
    assert pipeline.happened() == [(0, True)]
    pipeline.ask(0)
    pipeline.deferred.drop()  # as the next pass begins
    pipeline.deferred.launched()
    assert pipeline.happened() == []


def test_without_a_replay_to_come_all_is_gathered_at_once(pipeline: Pipeline) -> None:
    backward = {"prefetch_order": pipeline.orders.BACKWARD_PASS_ORDER}
    assert pipeline.ask(2) == [(2, True)]  # It does not begin with a graph.
    assert pipeline.ask(0, **backward) == [(0, True)]
    assert pipeline.ask(0, prefetch=False) == [(0, False)]
    assert pipeline.ask(0, async_param_gather=False) == [(0, True)]
    assert pipeline.ask(0, outer_fsdp_group_param_gather=True) == [(0, True)]
    pipeline.fsdp.eval()
    assert pipeline.ask(0) == [(0, True)]
    pipeline.deferred.launched()
    assert pipeline.happened() == []


MARKS = {"grad_added_to_main_grad": False, "__fsdp_param__": True, "overwrite_main_grad": None}


def cached(listed: list[Any]) -> CachedParameters:
    """Two of one bucket, one of another, and one more of the first, in FP8."""
    buckets = dict(zip(listed, (0, 0, 1, 0), strict=True))
    return CachedParameters(listed, buckets.__getitem__, lambda one: one is listed[3])


def marks(parameter: Any) -> dict[str, Any]:
    return {name: vars(parameter)[name] for name in MARKS if name in vars(parameter)}


@pytest.mark.parametrize("overwritten", [True, False])
def test_what_megatron_is_not_shown_is_marked_once(overwritten: bool) -> None:
    asked: list[Any] = []

    def gathered(params: list[Any], *args: Any, **options: Any) -> None:
        asked.append((params, args, options))
        for parameter in params:
            parameter.overwrite_main_grad = overwritten

    gather = _gathered(gathered)
    listed: list[Any] = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    ours = cached(listed)
    gather(ours, 1, bwd=True)
    ((shown, args, options),) = asked
    assert [id(p) for p in shown] == [id(listed[n]) for n in (0, 2, 3)]
    assert (args, options) == ((1,), {"bwd": True})
    # Those that it is shown it marks itself; megatron-core 0.20 overwrites sharded ones alone.
    own = {"overwrite_main_grad": overwritten}
    assert [marks(parameter) for parameter in listed] == [own, MARKS | own, own, own]
    listed[1].grad_added_to_main_grad = True
    gather(ours)
    assert asked[1] == (ours.shown, (), {}) and listed[1].grad_added_to_main_grad
    # Another list has marks of its own to set.
    gather(cached(listed))
    assert not listed[1].grad_added_to_main_grad


class Buffer:
    """Three parameters in a bucket that lies where it is told."""

    def __init__(self) -> None:
        self.memory = torch.arange(6.0)
        self.params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        self.set = 0

    def fetch_bucket(self, dtype: Any, set_param_data: bool, strict: bool) -> Any:
        if set_param_data:
            self.set += 1
            for parameter, piece in zip(self.params, self.memory.split(2), strict=True):
                parameter.data = piece
        return SimpleNamespace(data=self.memory)


def test_parameters_are_pointed_at_their_bucket_only_when_they_are_elsewhere() -> None:
    buffer = Buffer()
    fetch = _fetched(buffer)
    for _ in range(3):
        fetch(None, set_param_data=True)
    fetch(None)
    assert buffer.set == 1
    buffer.memory = torch.arange(6.0)
    fetch(None, set_param_data=True)
    assert buffer.set == 2 and buffer.params[2].data_ptr() == buffer.memory[4:].data_ptr()
    buffer.params[1].data = torch.zeros(2)
    fetch(None, set_param_data=True)
    assert buffer.set == 3 and buffer.params[1].data_ptr() == buffer.memory[2:].data_ptr()
