"""What nothing looked at in unsharding and gathering, found by ``python -m tools.mutate``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fastpath.params import unshard
from megatron_cg.fastpath.params.cached_lists import CachedParameters, ParameterLists
from megatron_cg.fastpath.params.deferred_prefetch import DeferredPrefetch
from megatron_cg.fsdp.fsdp_model import find_megatron_fsdp, gather_alone, raw_parameters


class Event:
    """A stub of CUDA's, which counts its records."""

    def __init__(self) -> None:
        self.records = 0

    def record(self) -> None:
        self.records += 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[DeferredPrefetch, list[Any]]:
    """A gather that is held until a launch, and the events that gathers were called with."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    deferred, gathered = DeferredPrefetch(), list[Any]()
    deferred.hold(gathered.append)
    assert gathered == []
    return deferred, gathered


def test_a_held_gather_waits_for_what_was_recorded_as_it_was_held(
    held: tuple[DeferredPrefetch, list[Any]],
) -> None:
    deferred, gathered = held
    deferred.launched()
    deferred.launched()
    (event,) = gathered
    assert event.records == 1
    deferred.hold(gathered.append)
    deferred.launched()
    assert gathered == [event, event] and event.records == 2


def test_a_held_gather_is_issued_once_where_no_graph_is_launched(
    held: tuple[DeferredPrefetch, list[Any]],
) -> None:
    deferred, gathered = held
    deferred.issue()
    deferred.issue()
    deferred.launched()
    assert gathered == [None]


def test_a_gather_of_a_pass_that_failed_is_forgotten(
    held: tuple[DeferredPrefetch, list[Any]],
) -> None:
    deferred, gathered = held
    deferred.drop()
    deferred.launched()
    assert gathered == []


def test_a_unit_begins_with_a_graph_if_its_first_weight_is_in_one() -> None:
    graphed, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    deferred = DeferredPrefetch([graphed])
    (inside,), (outside,) = graphed.parameters(), other.parameters()
    assert deferred.begins_with_graph([inside, outside])
    assert not deferred.begins_with_graph([outside, inside])
    assert not deferred.begins_with_graph([])


def test_parameters_that_stand_for_others_are_marked_with_them_and_once() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    cached = CachedParameters(parameters, lambda _parameter: 0, lambda _parameter: False)
    shown: list[Any] = []
    wait = unshard._gathered(lambda params, *_args: shown.append(params))
    wait(cached, True)
    assert shown == [cached.shown] and len(cached.others) == 2
    marks = ("grad_added_to_main_grad", "__fsdp_param__", "overwrite_main_grad")
    for parameter in cached.others:
        assert [getattr(parameter, name) for name in marks] == [False, True, True]
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    wait(cached, True)
    assert all(parameter.grad_added_to_main_grad for parameter in cached.others)  # type: ignore[attr-defined]
    plain = parameters[:1]
    wait(plain, True)
    assert shown[-1] is plain


@pytest.mark.parametrize("bwd", [False, True])
def test_a_unit_is_released_at_once_unless_that_was_asked_otherwise(bwd: bool) -> None:
    unit = nn.Linear(1, 1)
    released: list[tuple[list[Any], bool, bool]] = []
    lists = ParameterLists(
        lambda module, _: list(module.parameters()), lambda _parameter: 0, lambda _parameter: False
    )
    release = unshard._released(
        lambda *given: released.append(given), lists, lambda _unit: None, DeferredPrefetch()
    )
    release(unit, bwd)
    release(unit, bwd, True)
    release(unit, bwd, lazy=True)
    assert [lazy for _, _, lazy in released] == [False, True, True]
    assert all(direction is bwd for _, direction, _ in released)


def test_parameters_are_pointed_at_their_bucket_only_where_they_are_elsewhere() -> None:
    memory = torch.zeros(4)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    asked: list[bool] = []

    def fetch(_dtype: Any, set_param_data: bool, _strict: bool) -> Any:
        asked.append(set_param_data)
        if set_param_data:
            for number, parameter in enumerate(parameters):
                parameter.data = memory[2 * number : 2 * number + 2]
        return SimpleNamespace(data=memory)

    buffer = SimpleNamespace(params=parameters, fetch_bucket=fetch)
    fetched = unshard._fetched(buffer)
    assert fetched().data is memory and asked == [False]

    def is_set(expected: bool) -> None:
        asked.clear()
        assert fetched(None, set_param_data=True).data is memory
        assert (True in asked) is expected

    is_set(True)
    is_set(False)
    parameters[1].data = torch.zeros(2)
    is_set(True)
    is_set(False)
    memory = torch.zeros(4)
    is_set(True)


def pipeline(calls: list[tuple[Any, bool]], units: list[int]) -> Any:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    store = SimpleNamespace(
        param_to_param_group={weight: number for number, weight in enumerate(weights)},
        parameter_groups=[SimpleNamespace(fsdp_unit_id=number) for number in range(3)],
        double_buf_units=units,
    )
    found = SimpleNamespace(
        buffer=store,
        all_gather_params=lambda params, prefetch=False: calls.append((params, prefetch)),
    )
    return SimpleNamespace(all_gather_pipeline=found), weights


def test_units_are_gathered_ahead_only_where_all_that_share_buffers_are_captured() -> None:
    calls: list[tuple[Any, bool]] = []
    fsdp, weights = pipeline(calls, units=[0, 1])
    undo = gather_alone(fsdp, weights[:2])
    fsdp.all_gather_pipeline.all_gather_params("a", prefetch=True)
    undo()
    undo = gather_alone(fsdp, weights[:1])
    fsdp.all_gather_pipeline.all_gather_params("b", prefetch=True)
    undo()
    fsdp.all_gather_pipeline.all_gather_params("c", prefetch=True)
    assert calls == [("a", True), ("b", False), ("c", True)]


@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_are_sharded_or_raw_after_a_capture_as_before(
    dense_model: Any, sharded: bool
) -> None:
    fsdp = dense_model.module
    fsdp._replace_param_with_distributed_if_needed()
    if not sharded:
        fsdp._replace_param_with_raw_if_needed()
    with raw_parameters(fsdp):
        assert not fsdp.is_param_fsdp_distributed
    assert fsdp.is_param_fsdp_distributed == sharded


def test_a_member_of_megatron_fsdp_that_is_gone_is_named(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_megatron_fsdp(dense_model) is dense_model.module
    monkeypatch.setattr("megatron_cg.fsdp.fsdp_model._NEEDED", ("gone",))
    with pytest.raises(UpstreamChangedError, match=r"MegatronFSDP\.gone"):
        find_megatron_fsdp(dense_model)
