"""Megatron-FSDP's model: found, its units gathered alone, its parameters put back as they were."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_cg.errors import UpstreamChangedError
from megatron_cg.fsdp.megatron_fsdp import find_megatron_fsdp, gather_alone, raw_parameters


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


def test_what_a_capture_has_prefetched_is_over_without_a_warning(dense_model: Any) -> None:
    fsdp = dense_model.module
    pipeline = fsdp.all_gather_pipeline
    with warnings.catch_warnings(), raw_parameters(fsdp):
        warnings.simplefilter("error")
        pipeline.async_bucket_gather(0, False)
        assert pipeline.param_gather_event_map
    assert not pipeline.param_gather_event_map


def test_a_member_of_megatron_fsdp_that_is_gone_is_named(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_megatron_fsdp(dense_model) is dense_model.module
    monkeypatch.setattr("megatron_cg.fsdp.megatron_fsdp._NEEDED", ("gone",))
    with pytest.raises(UpstreamChangedError, match=r"MegatronFSDP\.gone"):
        find_megatron_fsdp(dense_model)
