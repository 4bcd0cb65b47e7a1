"""Unsharding with fewer calls: collectives, waits and frees are Megatron-FSDP's, in its order.

The next unit is gathered after the launch of a graph.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.fastpath.gather import (
    CachedParameters,
    DeferredPrefetch,
    Gathers,
    _fetched,
    _gathered,
    install_gathers,
    install_unshard,
)
from megatron_cg.tape import fakes
from megatron_cg.tape.cpu_model import build
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.functional.loops import RECOMPUTE
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

Events = list[tuple[Any, ...]]
GATHER = "gather"
RECOMPUTED = {"cuda_graph_impl": "none", "cuda_graph_modules": [], **RECOMPUTE}
SCENARIOS: dict[str, dict[str, Any]] = {
    "experts": {"experts": 4},
    "no double buffer": {
        "fsdp_options": {
            "fsdp_double_buffer": False,
            "fsdp_db_use_persist_buf_on_alloc_fail": False,
        }
    },
    "recomputed": {"options": RECOMPUTED},
    "no overlap": {"fsdp_options": {"overlap_param_gather": False}},
    "ZeRO-2": {"fsdp_options": {"data_parallel_sharding_strategy": "optim_grads"}},
}


def trained(options: dict[str, Any], *installs: Callable[[Any], Callable[[], None]]) -> Any:
    """Numbers of a run with an evaluation and a checkpoint, and what it did with buckets."""
    shape = CpuModelConfig(layers=3, hidden_size=16, ffn_hidden_size=16, **options)
    with trainer_of(shape, microbatches=2) as trainer:
        fsdp = trainer.model.module
        numbers: list[Any] = [trainer.step()]
        undo = ExitStack()
        events: Events = []
        with undo, recorded(fsdp, events):
            for install in installs:
                undo.callback(install(fsdp))
            numbers += [trainer.step(), evaluated(trainer), trainer.step()]
            # A forward pass that no backward pass follows, and weights that change after it.
            numbers += [float(trainer._forward().double().sum()), changed(trainer)]
            numbers += [len(fsdp.state_dict()), trainer.step()]
        states = sorted({str(module._training_state) for module in fsdp.module.modules()})
        numbers += [trainer.step(), states]
        return {"numbers": numbers, "events": events}


def shorten(fsdp: Any) -> Callable[[], None]:
    deferred = DeferredPrefetch()
    with ExitStack() as undo:
        undo.callback(install_unshard(fsdp, lambda _unit: None, deferred))
        undo.callback(install_gathers(fsdp, deferred))
        return undo.pop_all().close


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
    found = {}
    for name, options in SCENARIOS.items():
        found[name] = {"own": trained(options), "short": trained(options, shorten)}
    return found


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
    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def wait_event(self, event: object) -> None:
        self.events.append("waits for an earlier event")

    def wait_stream(self, stream: object) -> None:
        self.events.append("waits for all")


class Pipeline:
    """Megatron-FSDP's: bucket 0 is of no unit and gathered, those of the units are 1 to 3."""

    def __init__(self, model: Any, statuses: Mapping[int, str] = {}) -> None:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import (
            param_and_grad_buffer as upstream,
        )

        self.upstream: Any = upstream
        self.events: list[Any] = []
        self.own: Any = copy(model.module.all_gather_pipeline)
        self.groups = self.own.buffer.parameter_groups
        assert [group.fsdp_unit_id for group in self.groups] == [None, 0, 1, 2]
        self.own.bucket_status = dict(self.own.bucket_status)
        for bucket in range(4):
            self.set(bucket, statuses.get(bucket, "EMPTY" if bucket else "READY_TO_USE"))
        self.own.all_gather_params = lambda params, prefetch=False, **_: self.events.append(
            (params, prefetch)
        )
        self.own.ag_stream, self.own.async_bucket_gather = Stream(self.events), self.gather
        self.units = [nn.ParameterList(group.params) for group in self.groups[1:]]
        self.deferred = DeferredPrefetch()
        self.deferred.enable(self.units)
        self.training = True
        self.gathers: Any = Gathers(self.own, self.deferred, lambda: self.training)

    def set(self, bucket: int, status: str) -> None:
        self.own.bucket_status[bucket, False] = self.upstream.BucketStatus[status]

    def gather(self, bucket: int, _transposed: bool) -> None:
        self.events.append(bucket)
        self.set(bucket, "READY_TO_USE")

    def free(self, bucket: int) -> None:
        self.set(bucket, "EMPTY")

    def ask(self, bucket: int, *, backward: bool = False, **options: Any) -> list[Any]:
        orders = self.upstream.PrefetchOrder
        usual = {
            "prefetch": True,
            "prefetch_order": orders.BACKWARD_PASS_ORDER if backward else orders.FORWARD_PASS_ORDER,
            "suggested_AG_prefetch_size": 1,
            "outer_fsdp_group_param_gather": False,
            "bwd": backward,
        }
        self.gathers.all_gather_params(self.groups[bucket].params, **usual | options)
        return self.happened()

    def happened(self) -> list[Any]:
        found, self.events[:] = list(self.events), []
        return found


@pytest.fixture
def model(one_rank: None) -> Any:
    return build(CpuModelConfig(layers=3, hidden_size=16))


def test_only_what_is_not_there_is_gathered(model: Any) -> None:
    pipeline = Pipeline(model, dict.fromkeys((1, 2, 3), "READY_TO_USE"))
    pipeline.training = False
    pipeline.own.bucket_can_be_released = dict.fromkeys(pipeline.own.bucket_status, True)
    assert pipeline.ask(1) == []
    kept = [key[0] for key, freed in pipeline.own.bucket_can_be_released.items() if not freed]
    assert kept == [1]
    pipeline.free(2)
    assert pipeline.ask(1, prefetch=False) == []
    assert pipeline.ask(1) == ["waits for all", 2]
    pipeline.free(1)
    pipeline.set(2, "COMMUNICATING")
    assert pipeline.ask(1) == ["waits for all", 1]


@pytest.mark.parametrize(
    ("statuses", "together", "options"),
    [
        ({}, True, {}),
        ({}, False, {"async_param_gather": False}),
        ({}, False, {"outer_fsdp_group_param_gather": True}),
        # A bucket that is kept past a reset.
        ({1: "PRESERVED"}, False, {}),
    ],
)
def test_megatron_is_asked_for_what_is_more_than_a_gather_a_group(
    model: Any, statuses: Any, together: bool, options: Any
) -> None:
    pipeline = Pipeline(model, statuses)
    if together:
        pipeline.own.bucket_to_bucket_group = {0: 0, 1: 7, 2: 7, 3: 7}
    assert pipeline.ask(1, **options) == [(pipeline.groups[1].params, True)]


def test_the_next_unit_is_gathered_once_a_graph_is_launched_or_another_unit_is_asked_for(
    model: Any,
) -> None:
    pipeline = Pipeline(model)
    assert pipeline.ask(1) == ["waits for all", 1]
    pipeline.deferred.launched()
    # For what the unit before has launched, and not for the graph itself.
    assert pipeline.happened() == ["waits for an earlier event", 2]
    pipeline.deferred.launched()
    assert pipeline.ask(1) == []
    pipeline = Pipeline(model)
    pipeline.ask(1)
    pipeline.free(1)
    assert pipeline.ask(3) == ["waits for all", 2, "waits for all", 3]


def test_a_held_gather_is_issued_once_or_forgotten_with_its_pass(model: Any) -> None:
    pipeline = Pipeline(model)
    pipeline.ask(1)
    pipeline.deferred.issue()
    pipeline.deferred.launched()
    assert pipeline.happened() == ["waits for all", 2]
    for bucket in (1, 2):
        pipeline.free(bucket)
    pipeline.ask(1)
    pipeline.deferred.drop()  # as the next pass begins
    pipeline.deferred.launched()
    assert pipeline.happened() == []


def test_without_a_replay_to_come_all_is_gathered_at_once(model: Any) -> None:
    pipeline = Pipeline(model)
    pipeline.training = False
    assert pipeline.ask(1) == ["waits for all", 1, 2]
    pipeline = Pipeline(model)
    assert pipeline.ask(3, backward=True) == ["waits for all", 2, 3]
    pipeline = Pipeline(model)
    pipeline.deferred.enable(pipeline.units[1:])
    assert pipeline.ask(1) == ["waits for all", 1, 2]


MARKS = {"grad_added_to_main_grad": False, "__fsdp_param__": True, "overwrite_main_grad": None}


def parameters() -> list[Any]:
    """Two of one bucket, one of another, and one more of the first, in FP8."""
    return [nn.Parameter(torch.zeros(1)) for _ in range(4)]


def cached(listed: list[Any]) -> CachedParameters:
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
    listed = parameters()
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
