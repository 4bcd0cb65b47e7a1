"""Graphs under FSDP2 and DistributedDataParallel: bit-equal to eager, with memory that stays."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_cg import graph_units
from megatron_cg.errors import BufferInUseError
from megatron_cg.fsdp.fully_shard import group_of
from tests.unit.integrations.standalone.sharded import (
    IN_BF16,
    LATER,
    MICROBATCHES,
    STEPS,
    WARMUP,
    Case,
    Run,
    closed_while,
    evaluate,
    save_and_load,
    trained,
    under_ddp,
    under_fsdp2,
    unsharded_in_between,
    unsharded_in_between_later,
    without_sync,
)
from tests.unit.ranks import on_ranks


def prefetch(run: Run, step: int) -> None:
    if step == 0:
        one, two, three = cast(list[Any], run.network.layers)
        one.set_modules_to_forward_prefetch([two, three])
        three.set_modules_to_backward_prefetch([two, one])


def unshard_first(run: Run, step: int) -> None:
    """As a user does to gather the first unit while something else runs."""
    first: Any = run.network.layers[0]
    first.unshard()


def drop_a_loss(run: Run, step: int) -> None:
    """Right before the capture: DDP still expects its backward pass then."""
    if step == WARMUP:
        run.loss(20_000)


def interrupt(run: Run, step: int) -> None:
    """An exception in the middle of an eager forward pass; the loop goes on."""
    if step == LATER:
        unit: Any = run.network.layers[1]
        unit.broken, run.rows = True, 2
        with pytest.raises(ArithmeticError):
            run.loss(0)
        unit.broken, run.rows = False, 3


def keep_after_forward_later(run: Run, step: int) -> None:
    if step == LATER:
        run.model.set_reshard_after_forward(False)


def smaller_batches(run: Run, step: int) -> None:
    run.rows = 3 if step < LATER else 2


CASES = {
    "FSDP2": Case(under_fsdp2()),
    "FSDP2 in bf16": Case(under_fsdp2(mp_policy=IN_BF16)),
    "FSDP2, the last unit is not resharded": Case(under_fsdp2(after_forward={2: False})),
    "FSDP2, no unit is resharded": Case(under_fsdp2(after_forward={0: False, 1: False, 2: False})),
    "FSDP2, units stay unsharded between microbatches": Case(
        under_fsdp2(), microbatch=unsharded_in_between
    ),
    "FSDP2, one reduction a step": Case(under_fsdp2(mp_policy=IN_BF16), microbatch=without_sync),
    "FSDP2, explicit prefetch": Case(under_fsdp2(), before_step=prefetch),
    "FSDP2, a unit is unsharded before the step": Case(under_fsdp2(), before_step=unshard_first),
    "FSDP2, replicas of whole shards": Case(under_fsdp2(mesh=(2, 1))),
    "FSDP2, units of two shapes": Case(under_fsdp2(), inner=(16, 24, 16)),
    "FSDP2, no module around the units": Case(under_fsdp2(around=False)),
    "FSDP2, units stay unsharded between later microbatches": Case(
        under_fsdp2(), microbatch=unsharded_in_between_later
    ),
    "FSDP2, units are no longer resharded after forward": Case(
        under_fsdp2(), before_step=keep_after_forward_later
    ),
    "FSDP2, inputs of units need no gradient": Case(under_fsdp2(), detached=True),
    "FSDP2, evaluation": Case(under_fsdp2(), before_step=evaluate),
    "FSDP2, state is saved and loaded": Case(under_fsdp2(), before_step=save_and_load),
    "FSDP2, every replay is verified": Case(under_fsdp2(), options={"verify_interval": 1}),
    "DDP": Case(under_ddp()),
    "DDP, gradients in buckets": Case(under_ddp(gradient_as_bucket_view=True)),
    "DDP, unused parameters": Case(under_ddp(find_unused_parameters=True)),
    "DDP, one reduction a step": Case(under_ddp(), microbatch=without_sync),
    "DDP, a loss is dropped before the capture": Case(under_ddp(), before_step=drop_a_loss),
    "DDP, every replay is verified": Case(under_ddp(), options={"verify_interval": 1}),
    "DDP, evaluation": Case(under_ddp(), before_step=evaluate),
}
"""Every pass after the capture is replayed in these."""
OF_FOUR = {
    "FSDP2, two replicas of two shards": Case(under_fsdp2(mesh=(2, 2))),
    "FSDP2, resharded to pairs after forward": Case(
        under_fsdp2(mesh=(4,), after_forward={0: 2, 1: 2, 2: 2})
    ),
}
"""The same on four ranks."""
WITH_OTHER_BATCHES = {
    "FSDP2": Case(under_fsdp2(), before_step=smaller_batches),
    "FSDP2, units stay unsharded between microbatches": Case(
        under_fsdp2(), before_step=smaller_batches, microbatch=unsharded_in_between
    ),
    "FSDP2, units stay unsharded between later microbatches": Case(
        under_fsdp2(), before_step=smaller_batches, microbatch=unsharded_in_between_later
    ),
    "FSDP2, inputs of units need no gradient": Case(
        under_fsdp2(), before_step=smaller_batches, detached=True
    ),
}
"""From a step after the capture on, every pass runs eagerly in these."""


def memory() -> dict[str, Any]:
    """Where unsharded parameters lie while there are graphs, and what is left after them."""
    found: dict[str, Any] = {}

    def params(run: Run) -> list[Any]:
        groups = [group_of(layer) for layer in run.network.layers]
        return [group.fsdp_params for group in groups]

    def look(run: Run, step: int) -> None:
        if run.graphs is not None and step == LATER:
            found["addresses"] = [[p._unsharded_param.data_ptr() for p in of] for of in params(run)]

    def begins(model: Any, _last: bool) -> Any:
        held = next(iter(model.layers[0].parameters()))
        found.setdefault("sharded", []).append(isinstance(held, DTensor))
        return nullcontext()

    case = Case(under_fsdp2(), inner=(16, 16, 24), before_step=look, microbatch=begins)
    run = Run(case)
    run.train(graphed=True)
    every = [param for of in params(run) for param in of]
    found["held"] = sum(p.all_gather_outputs[0].untyped_storage().nbytes() for p in every)
    found["patched"] = [name for p in every for name in vars(p) if name.startswith("free_")]
    return found


def in_use_later() -> str:
    """What a run ends with whose units are unsharded at the same time only after the capture."""

    def change(run: Run, step: int) -> None:
        run.network.detached = step >= LATER

    try:
        Run(Case(under_fsdp2(), before_step=change)).train(graphed=True)
    except BufferInUseError as error:
        return str(error)
    return ""


def run_all() -> dict[str, Any]:
    """Every case for two ranks, in turn."""
    found: dict[str, Any] = {name: trained(case) for name, case in CASES.items()}
    found["eager"] = {name: trained(case) for name, case in WITH_OTHER_BATCHES.items()}
    found |= {"memory": memory(), "error": in_use_later()}
    found["interrupted"] = trained(Case(under_fsdp2(), before_step=interrupt))
    found["closed while unsharded"] = closed_while(Case(under_fsdp2()), unshard_first)
    return found


def run_four() -> dict[str, Any]:
    """Every case for four ranks, in turn."""
    return {name: trained(case) for name, case in OF_FOUR.items()}


def assert_replayed(report: dict[str, Any]) -> None:
    """Whether a case was equal, and every pass after the capture a replay."""
    assert report["equal"]
    counters, passes = report["counters"], (STEPS - WARMUP) * MICROBATCHES
    assert counters["captured"] == 3 and counters["replayed"] == 3 * passes
    assert counters["mismatched"] == 0


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """What each rank found."""
    return on_ranks(run_all)


@pytest.mark.parametrize("name", CASES)
def test_replays_train_the_same_bits(reports: list[dict[str, Any]], name: str) -> None:
    for report in reports:
        assert_replayed(report[name])


@pytest.mark.parametrize("name", WITH_OTHER_BATCHES)
def test_eager_passes_beside_graphs_train_the_same_bits(
    reports: list[dict[str, Any]], name: str
) -> None:
    for report in reports:
        found = report["eager"][name]
        assert found["equal"]
        assert found["counters"]["eager"] == 3 * (STEPS - LATER) * MICROBATCHES


def test_replays_train_the_same_bits_on_four_ranks() -> None:
    for found in on_ranks(run_four, 4):
        for report in found.values():
            assert_replayed(report)


def test_a_verified_replay_compares_gradients_too(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        counters = report["FSDP2, every replay is verified"]["counters"]
        assert counters["verified"] == counters["gradients_verified"] == counters["replayed"]


def test_units_of_one_shape_share_their_unsharded_memory(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        one, two, other = report["memory"]["addresses"]
        assert one == two and not set(one) & set(other)


def test_closing_gives_the_memory_back(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["memory"]["held"] == 0 and report["memory"]["patched"] == []


def test_between_steps_modules_hold_their_shards(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["memory"]["sharded"] == [True] * STEPS * MICROBATCHES


def test_graphs_are_closed_while_a_unit_is_unsharded(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["closed while unsharded"]


def test_training_goes_on_after_an_exception_in_a_unit(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["interrupted"]["equal"]
        counters = report["interrupted"]["counters"]
        assert counters["replayed"] == 3 * (STEPS - WARMUP) * MICROBATCHES
        assert counters["eager"] == 2  # of the pass that was interrupted in its second unit


def test_units_that_begin_to_need_one_buffer_end_the_run(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert re.match(
            r"FSDP2 gathers layers\.1 while layers\.2 is inside of its backward pass",
            report["error"],
        )


def test_a_process_without_process_groups_is_one_rank() -> None:
    assert not dist.is_initialized()
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphs = graph_units(
            model, ["0", "2"] if graphed else ["1"], warmup_steps=1, backend="tape"
        )
        with graphs:
            for step in range(4):
                with graphs.step():
                    optimizer.zero_grad()
                    model(torch.full((3, 4), float(step))).square().sum().backward()
                    optimizer.step()
            found.append([p.detach().clone() for p in model.parameters()])
            assert graphs.counters.replayed == 3 * (1 + graphed)
    assert all(map(torch.equal, *found))


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, flag: bool, table: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * table if flag else x
        return y


@pytest.mark.parametrize("new_table", [False, True])
def test_a_table_by_position_is_read_in_place_until_it_changes(new_table: bool) -> None:
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        unit, table = Scaled(), torch.arange(4.0)
        graphs = graph_units(torch.nn.Sequential(unit), ["0"], warmup_steps=3, backend="tape")
        for step in range(6):
            if new_table and step == 5:
                table = table + 1
            with graphs.step() if graphed else nullcontext():
                unit(torch.full((3, 4), float(step)), True, table).square().sum().backward()
        found.append([p.grad.clone() for p in unit.parameters() if p.grad is not None])
        if graphed:
            replays = 3 - new_table
            counters = graphs.counters
            assert (counters.replayed, counters.eager) == (replays, int(new_table))
            assert (counters.inputs_in_place, counters.inputs_copied) == (replays, replays)
        graphs.close()
    assert all(map(torch.equal, *found))
