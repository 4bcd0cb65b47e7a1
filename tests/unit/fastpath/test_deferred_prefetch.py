"""When gathers are issued: the next unit's after a launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.fastpath.detached_weights import _Detached
from megatron_cg.fastpath.gather import DeferredPrefetch, Gathers
from megatron_cg.tools.cpu import fakes
from tests.unit.ranks import on_ranks

UNITS = 3


class Stream(fakes.FakeStream):
    """Notes what it is told to wait for."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def wait_event(self, event: object) -> None:
        self.events.append("waits for an earlier event")

    def wait_stream(self, stream: object) -> None:
        self.events.append("waits for all")


class Pipeline:
    """An output layer without a unit, bucket 0, and units of one weight, buckets 1 to 3."""

    def __init__(self) -> None:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import (
            param_and_grad_buffer as upstream,
        )

        self.upstream: Any = upstream
        self.modules = [nn.Linear(1, 1, bias=False) for _ in range(UNITS + 1)]
        self.weights = [module.weight for module in self.modules]
        self.events: list[Any] = []
        own: Any = object.__new__(upstream.AllGatherPipeline)
        self.own = own
        own.buffer = SimpleNamespace(
            parameter_groups=[
                SimpleNamespace(
                    fsdp_unit_id=number - 1 if number else None,
                    transpose_weight_buffer=None,
                    model_weight_buffer=SimpleNamespace(
                        bucket_index=SimpleNamespace(size=1),
                        get_shard_from_local_buffer=lambda: self.weights[0],
                    ),
                )
                for number in range(UNITS + 1)
            ],
            param_to_param_group={weight: i for i, weight in enumerate(self.weights)},
            bucket_to_bucket_group={i: [i] for i in range(UNITS + 1)},
            num_buckets=UNITS + 1,
            ddp_config=SimpleNamespace(
                fsdp_double_buffer=True, outer_dp_sharding_strategy="no_shard"
            ),
            double_buf_units=list(range(UNITS)),
        )
        own.bucket_status = {(i, False): self.status("EMPTY") for i in range(UNITS + 1)}
        own.bucket_status[0, False] = self.status("READY_TO_USE")
        own.bucket_can_be_released = dict.fromkeys(own.bucket_status, False)
        own.bucket_to_bucket_group = {i: i for i in range(UNITS + 1)}
        own.ag_stream = Stream(self.events)
        self.deferred = DeferredPrefetch(self.modules[1:])
        self.training = True
        gathers: Any = Gathers(own, self.deferred, lambda: self.training)
        self.gathers = gathers
        self.gathers.async_bucket_gather = self.gather

    def status(self, name: str) -> Any:
        return self.upstream.BucketStatus[name]

    def gather(self, bucket: int, _transposed: bool) -> None:
        self.events.append(bucket)
        self.own.bucket_status[bucket, False] = self.status("READY_TO_USE")

    def free(self, bucket: int) -> None:
        self.own.bucket_status[bucket, False] = self.status("EMPTY")

    def ask(self, bucket: int, *, backward: bool = False) -> list[Any]:
        """As the hook before a unit's pass; returns what happened."""
        orders = self.upstream.PrefetchOrder
        self.gathers.all_gather_params(
            [self.weights[bucket]],
            prefetch=True,
            prefetch_order=orders.BACKWARD_PASS_ORDER if backward else orders.FORWARD_PASS_ORDER,
            suggested_AG_prefetch_size=1,
            outer_fsdp_group_param_gather=False,
            bwd=backward,
        )
        return self.happened()

    def happened(self) -> list[Any]:
        found, self.events[:] = list(self.events), []
        return found


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with fakes.cpu_fakes():
        yield


def test_the_next_unit_is_gathered_once_a_graph_is_launched() -> None:
    pipeline = Pipeline()
    assert pipeline.ask(1) == ["waits for all", 1]
    pipeline.deferred.launched()
    # For what the unit before has launched, and not for the graph itself.
    assert pipeline.happened() == ["waits for an earlier event", 2]
    pipeline.deferred.launched()
    assert pipeline.ask(1) == []


def test_what_no_graph_was_launched_for_goes_before_what_is_asked_for_next() -> None:
    pipeline = Pipeline()
    pipeline.ask(1)
    pipeline.free(1)
    assert pipeline.ask(3) == ["waits for all", 2, "waits for all", 3]


def test_a_held_gather_is_issued_once_or_forgotten_with_its_pass() -> None:
    pipeline = Pipeline()
    pipeline.ask(1)
    pipeline.deferred.issue()
    pipeline.deferred.launched()
    assert pipeline.happened() == ["waits for all", 2]
    pipeline.free(1)
    pipeline.free(2)
    pipeline.ask(1)
    pipeline.deferred.drop()  # as the next pass begins
    pipeline.deferred.launched()
    assert pipeline.happened() == []


def test_a_unit_begins_with_a_graph_if_its_first_weight_is_in_one() -> None:
    inside, outside = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    deferred = DeferredPrefetch([nn.ParameterList([inside])])
    assert deferred.begins_with_graph([inside, outside])
    assert not deferred.begins_with_graph([outside, inside])
    assert not deferred.begins_with_graph([])


def test_without_a_replay_to_come_all_is_gathered_at_once() -> None:
    pipeline = Pipeline()
    pipeline.training = False
    assert pipeline.ask(1) == ["waits for all", 1, 2]
    pipeline = Pipeline()
    assert pipeline.ask(3, backward=True) == ["waits for all", 2, 3]
    pipeline = Pipeline()
    pipeline.gathers._deferred = DeferredPrefetch(pipeline.modules[2:])
    assert pipeline.ask(1) == ["waits for all", 1, 2]


def trained() -> dict[str, Any]:
    """Losses with graphs and without, and when gathers are issued in a step with graphs."""
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
    from megatron_cg.tools.cpu.voting import VotingTrainer

    found: dict[str, Any] = {}
    for graphs in (False, True):
        model = CpuModelConfig(layers=UNITS, graph_modules=("attn", "mlp"))
        trainer: Any = VotingTrainer(TrainingPlan(model, graphs=True, microbatches=1))
        try:
            numbers = [trainer.step()]
            if graphs:
                trainer.start()
            numbers += [trainer.step(), trainer.step()]
            with pytest.MonkeyPatch.context() as patch:
                found["events"] = noted(trainer.model.module, patch)
                numbers.append(trainer.step())
            found[str(graphs)] = numbers
        finally:
            trainer.close()
            parallel_state.destroy_model_parallel()
    return found


def noted(fsdp: Any, patch: pytest.MonkeyPatch) -> list[Any]:
    """Units as they are gathered, their forward passes, and when a backward pass begins."""
    events: list[Any] = []
    own = dist.all_gather_into_tensor
    units = {
        group.model_weight_buffer.data.untyped_storage().data_ptr(): group.fsdp_unit_id
        for group in fsdp.param_and_grad_buffer.parameter_groups
    }

    def gathered(*args: Any, **kwargs: Any) -> Any:
        if "input_tensor" in kwargs:
            unit = units[kwargs["input_tensor"].untyped_storage().data_ptr()]
            backward = fsdp._root_pre_backward_hook_issued
            events.append(f"{'backward' if backward else 'forward'}: gather {unit}")
        return own(*args, **kwargs)

    patch.setattr(dist, "all_gather_into_tensor", gathered)
    launch = _Detached.apply

    def launched(*args: Any) -> Any:
        outputs: Any = launch(*args)  # type: ignore[no-untyped-call]
        events.append("launch")
        return outputs

    patch.setattr(_Detached, "apply", launched)
    return events


def test_gathers_overlap_with_graphs_and_numbers_stay() -> None:
    for found in on_ranks(trained):
        assert found["True"] == found["False"]
        units = [event for event in found["events"] if "None" not in event]
        assert units == [
            *("forward: gather 0", "launch"),
            *("forward: gather 1", "launch"),
            *("forward: gather 2", "launch"),
            # Megatron-FSDP prefetches unit 1 in the call that asks for unit 2, in their order.
            *("backward: gather 1", "backward: gather 2", "backward: gather 0"),
        ]
