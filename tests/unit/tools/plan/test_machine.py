"""What a plan changes in its process, and that it is undone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.plan import fake_machine as machine
from megatron_cg.tools.plan.fake_machine import (
    HOPPER,
    group_of_rank_0,
    process_groups,
    simulated_gpus,
)
from megatron_cg.tools.plan.fakes.packages import TE_VERSION, install

MEGATRON = "megatron.core.extensions.transformer_engine"


def test_fakes_are_put_in_and_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MEGATRON, raising=False)
    monkeypatch.setitem(sys.modules, "mamba_ssm", ModuleType("mamba_ssm"))
    before, compiler = dict(sys.modules), torch.compile
    undo = install()
    assert sys.modules["transformer_engine"].__version__ == TE_VERSION
    assert sys.modules["mamba_ssm"] is not before["mamba_ssm"]
    assert torch.compile is not compiler
    undo()
    assert sys.modules == before and torch.compile is compiler


def test_a_megatron_that_is_there_already_is_not_planned_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, MEGATRON, ModuleType(MEGATRON))
    before = dict(sys.modules)
    with pytest.raises(MegatronCGError, match="imported already"):
        install()
    assert sys.modules == before


def test_gpus_are_simulated_and_gone_afterwards() -> None:
    names = ("current_device", "get_device_capability", "Stream", "synchronize")
    before = [getattr(torch.cuda, name) for name in names]
    factory, environment = torch.empty, dict(os.environ)
    with pytest.raises(KeyError), simulated_gpus({"MEGATRON_CG_PLANNED": "1"}):
        assert torch.empty(2, device="cuda").device.type == "meta"
        assert torch.ones(2, device=torch.cuda.current_device()).device.type == "meta"
        assert torch.zeros(2).to("cuda").device.type == torch.zeros(2).cuda().device.type == "meta"
        assert torch.zeros(2).device.type == "cpu"
        assert torch.cuda.get_device_capability() == HOPPER
        os.environ["MEGATRON_SET"] = os.environ["MEGATRON_CG_PLANNED"]
        raise KeyError
    assert [getattr(torch.cuda, name) for name in names] == before
    assert torch.empty is factory and dict(os.environ) == environment


def sizes(world: int, **given: Any) -> SimpleNamespace:
    """Megatron's arguments that say how a run is spread."""
    return SimpleNamespace(
        **{
            "world_size": world,
            "use_tp_pp_dp_mapping": False,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "hierarchical_context_parallel_sizes": None,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "num_distributed_optimizer_instances": 1,
        }
        | given
    )


SPREADS = {
    "data": {},
    "tensor and context": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "experts": {"expert_model_parallel_size": 4},
    "experts apart": {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
    "instances": {"num_distributed_optimizer_instances": 2, "expert_model_parallel_size": 2},
}


def groups_of(args: Any) -> dict[str, list[int]]:
    """Rank 0's groups by name, each as its ranks."""
    with simulated_gpus(), process_groups(args) as groups:
        found = {name: value for name, value in vars(groups).items() if value is not None}
        return {
            name: torch.distributed.get_process_group_ranks(group)
            for name, group in found.items()
            if isinstance(group, torch.distributed.ProcessGroup)
        }


@pytest.mark.parametrize("name", SPREADS)
def test_the_groups_of_rank_0_are_those_that_megatron_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = groups_of(sizes(16, **SPREADS[name]))
    monkeypatch.setattr(machine, "_of_rank_0", nullcontext)
    expected = groups_of(sizes(16, **SPREADS[name]))
    assert len(expected) > 10
    # No plan reads the members of this group, only its size.
    for groups in (found, expected):
        groups["intra_dist_opt"] = [len(groups["intra_dist_opt"])]
    assert found == expected


def test_a_group_of_rank_0_is_the_one_that_megatron_lists() -> None:
    from megatron.core.parallel_state import generate_masked_orthogonal_rank_groups

    shape = [2, 3, 1, 4]
    for mask in product([False, True], repeat=4):
        listed = generate_masked_orthogonal_rank_groups(24, shape, list(mask))
        assert group_of_rank_0(shape, mask) == next(group for group in listed if 0 in group)


def test_a_run_of_many_ranks_makes_no_more_groups_and_exchanges_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[-1] += 1
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr("torch.distributed.new_group", counted(torch.distributed.new_group))
    gather = "torch.distributed.distributed_c10d._object_to_tensor"
    monkeypatch.setattr(gather, counted(torch.distributed.distributed_c10d._object_to_tensor))
    for world in (4, 4096):
        counts.append(0)
        with simulated_gpus(), process_groups(sizes(world)):
            told: list[Any] = [None] * world
            torch.distributed.all_gather_object(told, {"rows": 3})
            assert told == [{"rows": 3}] * world
    assert counts[0] == counts[1] > 10


def test_a_model_can_be_built_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has built none before: then Megatron makes its generators anew."""
    from megatron.core.tensor_parallel import random

    names = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
    for name, value in zip(names, (None, False), strict=True):
        monkeypatch.setattr(random, name, value)
    groups_of(sizes(2))
    assert [getattr(random, name) for name in names] == [None, False]
