"""Graphs under Megatron-FSDP v2: bit-equal to eager, with unsharded parameters that stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_fsdp.experimental import (
    Flat,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_cg import graph_units
from megatron_cg.capture.guarded_capture import GuardedCapture
from megatron_cg.errors import BufferInUseError, ConfigurationError, HookError
from megatron_cg.fsdp.find_sharding import find_sharding
from tests.unit.integrations.standalone.sharded import (
    LATER,
    MICROBATCHES,
    STEPS,
    WARMUP,
    Case,
    Network,
    Run,
    closed_while,
    evaluate,
    save_and_load,
    trained,
)
from tests.unit.ranks import on_ranks

OF_ONE_AXIS = Placements(["dp"], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
HYBRID = Placements(
    ["outer", "dp"],
    parameter=[Replicate(), Flat()],
    gradient=[Partial(dist.ReduceOp.AVG), Flat()],
    optimizer=[Replicate(), Flat()],
)


def layers_of(network: Network) -> list[Any]:
    return list(network.layers)


def under_v2(
    *,
    prepare: Callable[[Network], object] = lambda _network: None,
    mesh: tuple[int, ...] = (2,),
    root: bool = True,
    **options: Any,
) -> Callable[[Network], Any]:
    """``fully_shard`` on each layer and, unless ``root`` is False, on the whole."""

    def wrap(network: Network) -> Any:
        prepare(network)
        axes = init_device_mesh("cpu", mesh, mesh_dim_names=("outer", "dp")[-len(mesh) :])
        placements = HYBRID if len(mesh) > 1 else OF_ONE_AXIS
        for layer in network.layers:
            fully_shard(layer, axes, placements, **options)
        if root:
            fully_shard(network, axes, placements, **options)
        return network

    return wrap


def case(wrap: Callable[[Network], Any], **more: Any) -> Case:
    return Case(wrap, adapt=fully_shard_optimizer, **more)


def in_bf16(network: Network) -> None:
    """Weights compute in bf16, and the optimizer has them in fp32."""
    network.to(torch.bfloat16)


def with_frozen_layer(network: Network) -> None:
    network.layers[1].requires_grad_(False)


class InReverse(nn.ModuleList):
    """Runs its modules from the last to the first."""

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def run_in_reverse(network: Network) -> None:
    network.layers = InReverse(network.layers)


def last_alone(model: nn.Module, last: bool) -> Any:
    return microbatch(model, last)


def gather_first(run: Run, _step: int) -> None:
    """As a prefetch before the step does."""
    run.model._lazy_init_context()
    layers_of(run.network)[0]._unshard_parameter_groups()


def forward_alone(run: Run, _step: int) -> None:
    """A loss without a backward pass."""
    run.losses.append(run.loss(10_001).detach().clone())


CASES = {
    "fp32": case(under_v2()),
    "bf16": case(under_v2(prepare=in_bf16)),
    "units of two shapes": case(under_v2(), inner=(16, 24, 16)),
    "units of one shape": case(under_v2(), inner=(16, 16, 16, 16, 16)),
    "the root is not sharded": case(under_v2(root=False)),
    "replicas of whole shards": case(under_v2(mesh=(2, 1)), microbatch=last_alone),
    "a frozen unit": case(under_v2(prepare=with_frozen_layer)),
    "evaluation": case(under_v2(), before_step=evaluate),
    "a unit is gathered before the step": case(under_v2(), before_step=gather_first),
    "a loss without a backward pass": case(under_v2(), before_step=forward_alone),
    "state is saved and loaded": case(under_v2(), before_step=save_and_load),
    "every replay is verified": case(under_v2(), options={"verify_interval": 1}),
}
"""Every training pass after the capture is replayed in these."""
OF_FOUR = {
    "shards of four": case(under_v2(mesh=(4,))),
    "two replicas of two shards": case(under_v2(mesh=(2, 2)), microbatch=last_alone),
}


def groups(run: Run) -> list[Any]:
    return [group for layer in layers_of(run.network) for group in layer._parameter_groups]


def memory() -> dict[str, Any]:
    """Where unsharded parameters lie while there are graphs, and what is left after them."""
    found: dict[str, Any] = {}

    def look(run: Run, step: int) -> None:
        if step == LATER:
            found["addresses"] = [group.unsharded_parameters[0].data_ptr() for group in groups(run)]

    def begins(model: Any, _last: bool) -> Any:
        held = next(iter(model.layers[0].parameters()))
        found.setdefault("sharded", []).append(isinstance(held, DTensor))
        return nullcontext()

    one = case(under_v2(), inner=(16, 16, 16, 16, 24), before_step=look, microbatch=begins)
    run = Run(one)
    run.train(graphed=True)
    buffers = [group._unsharded_model_weight for group in groups(run)]
    found["held"] = sum(buffer.local_buffer.untyped_storage().nbytes() for buffer in buffers)
    found["patched"] = [name for buffer in buffers for name in vars(buffer) if "storage" in name]
    return found


def moved_later() -> dict[str, Any]:
    """From a step on, the first unit is never resharded."""

    def before(run: Run, step: int) -> None:
        first = layers_of(run.network)[0]
        if step == LATER:
            first._reshard_parameter_groups = lambda: None

    return trained(case(under_v2(), before_step=before))


def taken_in_backward() -> str:
    """What is said if a unit is gathered in the backward pass while its buffer is in use."""

    def before(run: Run, step: int) -> None:
        if step != LATER:
            return
        first, _, third = (group._unsharded_model_weight for group in groups(run))
        first.reallocate_storage()
        probe = torch.ones(1, requires_grad=True)
        probe.register_hook(lambda _gradient: third.reallocate_storage())
        try:
            probe.sum().backward()
        finally:
            first.release_storage()

    return said(lambda: Run(case(under_v2(), before_step=before)).train(graphed=True))


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except (BufferInUseError, ConfigurationError, HookError) as error:
        return str(error)
    return ""


def refused() -> list[Any]:
    """What is said of each mistake, and which hooks are v2's."""
    network: Any = under_v2()(Network((16,)))
    inside = said(lambda: graph_units(network, ["layers.0.up"], backend="tape"))
    group = network.layers[0]._parameter_groups[0]
    group._symm_mem_pool = object()
    symmetric = said(lambda: graph_units(network, ["layers.*"], backend="tape"))
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    both = said(lambda: find_sharding(nn.ModuleList([network, ddp])))
    reverse = Run(case(under_v2(prepare=run_in_reverse)))
    order = said(lambda: reverse.train(graphed=True))
    hooks = [*network.layers[0]._forward_hooks.values(), ddp.forward]
    made = [find_sharding(network).made(hook) for hook in hooks]
    return [inside, symmetric, both, order, made]


def weights_of_capture() -> bool:
    """Whether a capture computes with the weights that an eager pass in its place has."""
    one = case(under_v2())
    eager, graphed = Run(one), Run(one)
    there: dict[str, list[torch.Tensor]] = {}
    here: dict[str, torch.Tensor] = {}

    def look(name: str, module: Any, _args: Any) -> None:
        there.setdefault(name, []).append(module.up.weight.detach().clone())

    begun = GuardedCapture._pass_begun

    def see(self: Any, index: int, forward: bool, warmup: bool) -> None:
        name = self._units[index].name
        weight: Any = graphed.network.get_submodule(f"{name}.up").weight
        here.setdefault(name, weight.detach().clone())
        begun(self, index, forward, warmup)

    for name, layer in eager.network.named_modules():
        if name in ("layers.0", "layers.1", "layers.2"):
            layer.register_forward_pre_hook(partial(look, name))
    eager.train()
    with patch.object(GuardedCapture, "_pass_begun", see):
        graphed.train(graphed=True)
    number = WARMUP * MICROBATCHES
    return bool(here) and all(torch.equal(there[name][number], one) for name, one in here.items())


def run_all() -> dict[str, Any]:
    """Every case for two ranks, in turn."""
    found: dict[str, Any] = {name: trained(one) for name, one in CASES.items()}
    found |= {"memory": memory(), "moved": moved_later(), "refused": refused()}
    found["taken in backward"] = taken_in_backward()
    found["weights of the capture"] = weights_of_capture()
    found["closed while gathered"] = closed_while(case(under_v2()), gather_first)
    return found


def run_four() -> dict[str, Any]:
    """Every case for four ranks, in turn."""
    return {name: trained(one) for name, one in OF_FOUR.items()}


def assert_replayed(report: dict[str, Any]) -> None:
    """Whether a case was equal, and every training pass after the capture a replay."""
    assert report["equal"]
    counters = report["counters"]
    passes = (STEPS - WARMUP) * MICROBATCHES
    assert counters["captured"] >= 3 and counters["mismatched"] == 0
    assert counters["replayed"] >= counters["captured"] * passes


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    """What each rank found."""
    return on_ranks(run_all)


@pytest.mark.parametrize("name", CASES)
def test_replays_train_the_same_bits(reports: list[dict[str, Any]], name: str) -> None:
    for report in reports:
        assert_replayed(report[name])


def test_replays_train_the_same_bits_on_four_ranks() -> None:
    for found in on_ranks(run_four, 4):
        for report in found.values():
            assert_replayed(report)


def test_a_verified_replay_compares_gradients_too(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        counters = report["every replay is verified"]["counters"]
        assert counters["verified"] == counters["gradients_verified"] == counters["replayed"]


def test_units_of_one_shape_alternate_between_two_buffers(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        one, two, three, four, other = report["memory"]["addresses"]
        assert one == three and two == four and len({one, two, other}) == 3


def test_closing_gives_the_memory_back(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["memory"]["held"] == 0 and report["memory"]["patched"] == []


def test_between_steps_modules_hold_their_shards(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["memory"]["sharded"] == [True] * STEPS * MICROBATCHES


def test_a_buffer_in_use_in_the_backward_pass_is_an_error(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert "while another unit holds the buffer" in report["taken in backward"]


def test_a_unit_whose_buffer_is_in_use_runs_eagerly(reports: list[dict[str, Any]]) -> None:
    """The third unit would have the first one's buffer."""
    for report in reports:
        assert report["moved"]["equal"]
        assert report["moved"]["counters"]["mismatched"] == (STEPS - LATER) * MICROBATCHES


def test_graphs_are_closed_while_a_unit_is_gathered(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["closed while gathered"]


def test_a_capture_computes_with_real_weights(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["weights of the capture"]


def test_refusals_name_the_unit_and_what_to_do(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        inside, symmetric, both, order, made = report["refused"]
        assert "units run in the order layers.2, layers.1, layers.0, and were registered" in order
        assert made == [True, False]
        assert "unit layers.0.up is a Linear without fully_shard of its own" in inside
        assert "unit layers.0 was sharded with use_symm_mem=True" in symmetric
        assert "Megatron-FSDP v2 and DistributedDataParallel" in both
