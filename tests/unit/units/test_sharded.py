"""Graphs under each way of sharding: bits as in eager training, and memory that stays."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard

from megatron_cg import graph_units
from megatron_cg.errors import BufferInUseError, ConfigurationError, HookError, ReplayMismatchError
from megatron_cg.fsdp.roles import unsharded_parameters
from megatron_cg.fully_shard.fsdp2 import FullyShard, own_groups
from megatron_cg.fully_shard.megatron_fsdp_v2 import _in_order
from megatron_cg.fully_shard.per_module import Buffer
from megatron_cg.upstream.patch import combine_undos
from tests.unit.ranks import on_ranks
from tests.unit.units.sharded import (
    IN_BF16,
    IN_CONTEXT,
    LATER,
    MICROBATCHES,
    STEPS,
    WARMUP,
    WIDTH,
    ZERO_1,
    ZERO_2,
    Block,
    Case,
    Network,
    Run,
    closed_while,
    evaluate,
    marked_last,
    save_and_load,
    trained,
    under_ddp,
    under_fsdp2,
    under_v1,
    under_v2,
    unsharded_in_between,
    without_sync,
)

PARTS_OF_V2 = ["layouts", "views", "packing", "detached-weights-of-graphs"]
PLACED: Any = getattr(_fsdp_common, "ShardPlacementResult", None)


def layers_of(run: Run) -> list[Any]:
    return list(run.network.layers)


def prefetch(run: Run, step: int) -> None:
    if step == 0:
        one, two, three = layers_of(run)
        one.set_modules_to_forward_prefetch([two, three])
        three.set_modules_to_backward_prefetch([two, one])


def unshard_first(run: Run, _step: int) -> None:
    """As a user does to gather the first unit while something else runs."""
    layers_of(run)[0].unshard()


def hold_all(run: Run, step: int) -> None:
    """As a user does to export weights; at the capture too, and one unit at a time."""
    if step in {WARMUP, LATER}:
        held = []
        for layer in layers_of(run):
            layer.unshard()
            held.append(layer.up.weight.detach())
        held += [layer.up.weight for layer in layers_of(run)]
        run.losses += [weight.detach().clone() for weight in held]


def gather_first(run: Run, _step: int) -> None:
    """As a prefetch of v2 before the step does."""
    if not IN_CONTEXT:
        run.model._lazy_init_context()
    layers_of(run)[0]._unshard_parameter_groups()


def drop_a_loss(run: Run, step: int) -> None:
    """Right before the capture: DDP still expects its backward pass then."""
    if step == WARMUP:
        run.loss(20_000)


def interrupt(run: Run, step: int) -> None:
    """An exception in the middle of an eager forward pass; the loop goes on."""
    if step == LATER:
        unit = layers_of(run)[1]
        unit.broken, run.rows = True, 2
        with pytest.raises(ArithmeticError):
            run.loss(0)
        unit.broken, run.rows = False, 3
        if hasattr(run.model, "reset_iter_state"):  # torch 2.13; FSDP2 needs it from there on
            run.model.reset_iter_state()


def never_resharded_later(run: Run, step: int) -> None:
    if step == LATER:
        (group,) = layers_of(run)[0]._parameter_groups
        group.reshard_parameters = group.release_unsharded_storage = lambda: None


def on_two_meshes(network: Network) -> Any:
    """Each layer has parameters on two process groups; torch 2.12 and later."""
    other = DeviceMesh.from_group(dist.new_group(), "cpu")
    mesh = init_device_mesh("cpu", (2,))
    placed = PLACED(Shard(0), _fsdp_common.FSDPMeshInfo(other, shard_mesh_dim=0))
    for layer in network.layers:
        own: Any = dict.fromkeys(layer.get_submodule("up").parameters(), placed)
        fully_shard(layer, mesh=mesh, shard_placement_fn=own.get)
    return fully_shard(network, mesh=mesh)


def with_weights_used_twice(network: Network) -> Network:
    for layer in network.layers:
        layer.down = layer.up
    return network


class InReverse(nn.ModuleList):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class Gated(Block):
    """Its second output alone depends on ``gate``."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, double: bool = False) -> Any:
        return super().forward(x, double), self.gate(x).square().mean()


def with_gates(network: Any) -> None:
    """The loss does not use the first second output where the network is doubled."""
    network.layers = nn.ModuleList(Gated(16) for _ in network.layers)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x, seconds = network.embed(tokens), []
        for layer in network.layers:
            x, second = layer(x)
            seconds.append(second)
        return network.head(x) * (1 + sum(seconds[network.doubled :]))  # type: ignore[no-any-return]

    network.forward = forward


class UpFirst(Block):
    """Its module ``up`` runs behind another one, and is registered before it."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        del self._parameters["scale"]
        self.register_buffer("scale", torch.ones(WIDTH))
        modules = self._modules
        self._modules = {"up": modules.pop("up"), **modules}


def with_up_first(network: Network) -> None:
    network.layers = nn.ModuleList(UpFirst(16) for _ in network.layers)


def fewer_on_one_rank(run: Run, step: int) -> None:
    run.rows = 2 if step == LATER and dist.get_rank() else 3


def smaller_on_one_rank(run: Run, step: int) -> None:
    run.network.doubled = step == LATER
    run.rows = 2 if step == LATER and dist.get_rank() else 3


def passes_in_pairs(run: Run, _step: int) -> None:
    """One loss of two forward passes: a replay, and an eager pass, since a replay waits."""

    def passes(microbatches: int) -> list[torch.Tensor]:
        losses = [run.loss(microbatches * run.steps + number) for number in range(microbatches)]
        sum(losses).backward()  # type: ignore[union-attr]
        return [loss.detach().clone() for loss in losses]

    run.passes = passes  # type: ignore[method-assign]


WRAPS: dict[str, Callable[[Network], Any]] = {
    "FSDP2": under_fsdp2(),
    "v1": under_v1(),
    "v2": under_v2(),
    "DDP": under_ddp(),
}
CASES = {
    f"{way}, evaluated, units of two shapes": Case(
        wrap, (16, 24, 16), {"verify_interval": 1, "verify_steps": 2}, evaluate
    )
    for way, wrap in WRAPS.items()
} | {
    "FSDP2, no unit is resharded": Case(under_fsdp2(after_forward={0: False, 1: False, 2: False})),
    "FSDP2, units stay unsharded between microbatches": Case(
        under_fsdp2(), microbatch=unsharded_in_between
    ),
    "FSDP2, one reduction a step": Case(under_fsdp2(mp_policy=IN_BF16), microbatch=without_sync),
    "FSDP2, explicit prefetch": Case(under_fsdp2(), before_step=prefetch),
    "FSDP2, a unit is unsharded before the step": Case(under_fsdp2(), before_step=unshard_first),
    "FSDP2, all units are unsharded before the step": Case(under_fsdp2(), before_step=hold_all),
    "FSDP2, no module around the units": Case(under_fsdp2(around=False)),
    "FSDP2, inputs of units need no gradient": Case(under_fsdp2(), detached=True),
    "FSDP2, state is saved and loaded": Case(under_fsdp2(), before_step=save_and_load),
    "v1, optimizer and gradients": Case(under_v1(zero_dp_strategy="optim_grads")),
    "v2, bf16": Case(under_v2(prepare=nn.Module.bfloat16)),
    "v2, five units of one shape": Case(under_v2(), inner=(16, 16, 16, 16, 16)),
    "v2, the root is not sharded": Case(under_v2(root=False)),
    "v2, a frozen unit": Case(
        under_v2(prepare=lambda network: network.layers[1].requires_grad_(False))
    ),
    "v2, a unit is gathered before the step": Case(under_v2(), before_step=gather_first),
    "v2, a loss without a backward pass": Case(
        under_v2(), before_step=lambda run, _: run.losses.append(run.loss(10_001).detach().clone())
    ),
    "v2, sharded modules in units": Case(under_v2(inside=True), options={"verify_interval": 2}),
    "v2, state is saved and loaded": Case(under_v2(), before_step=save_and_load),
    "DDP, gradients in buckets": Case(under_ddp(gradient_as_bucket_view=True)),
    "DDP, unused parameters": Case(under_ddp(find_unused_parameters=True)),
    "DDP, one reduction a step": Case(under_ddp(), microbatch=without_sync),
    "DDP, a loss is dropped before the capture": Case(under_ddp(), before_step=drop_a_loss),
    "FSDP2, an exception in a unit": Case(
        # The pass that was interrupted in its second unit is eager.
        *(under_fsdp2(), (16,) * 3, {}, interrupt),
        counts=lambda _: {"replayed": 3 * (STEPS - WARMUP) * MICROBATCHES, "eager": 2},
    ),
    "v2, a unit whose buffer is in use": Case(
        # The third unit would have the first one's.
        *(under_v2(), (16,) * 3, {}, never_resharded_later),
        counts=lambda _: {"mismatched": (STEPS - LATER) * MICROBATCHES},
    ),
}
for name, case in {
    "plain": Case(under_fsdp2()),
    "units stay unsharded": Case(under_fsdp2(), microbatch=unsharded_in_between),
    "detached": Case(under_fsdp2(), detached=True),
}.items():
    CASES[f"FSDP2, other batches, {name}"] = replace(
        case,
        before_step=lambda run, step: setattr(run, "rows", 3 if step < LATER else 2),
        counts=lambda _: {"eager": 3 * (STEPS - LATER) * MICROBATCHES},
    )
for fast_path in (False, True):
    # A rank reduces the buckets of its eager passes in the order of replays.
    CASES[f"v1, rank 1 alone is eager, fast path {fast_path}"] = Case(
        *(under_v1(with_gates), (16,) * 3, {"fast_path": fast_path}, smaller_on_one_rank),
        counts=lambda rank: {"eager": rank * 3 * MICROBATCHES},
    )
    # All reduce the sharded modules of a unit in one order. Graphs have another one than eager
    # passes: in the first without the fast path, and in the second with it.
    for prepare in (nn.Module.float, with_up_first):
        CASES[f"v2, rank 1 alone is eager, {prepare.__name__}, fast path {fast_path}"] = Case(
            under_v2(prepare=prepare, inside=True),
            options={"fast_path": fast_path},
            before_step=fewer_on_one_rank,
            counts=lambda rank: {"eager": rank * 3 * MICROBATCHES},
        )
if PLACED is not None:
    CASES["FSDP2, parameters on two meshes"] = Case(on_two_meshes, options={"verify_interval": 2})
for zero, placed in {"ZeRO-1": ZERO_1, "ZeRO-2": ZERO_2}.items() if IN_CONTEXT else ():
    # The released v2 has ZeRO-3 alone.
    CASES[f"main's v2, {zero}"] = Case(
        under_v2(prepare=nn.Module.bfloat16, placed=placed), before_step=evaluate
    )
if not IN_CONTEXT:  # Main's v2 refuses a pass before the backward of another one.
    CASES["v2, one backward pass of two forward passes"] = Case(
        *(under_v2(), (16, 24, 32), {}, passes_in_pairs),
        counts=lambda _: dict.fromkeys(("replayed", "eager"), 3 * (STEPS - WARMUP)),
    )
OF_FOUR = {
    "FSDP2, two replicas of two shards": Case(under_fsdp2(mesh=(2, 2))),
    "FSDP2, resharded to pairs after forward": Case(
        under_fsdp2(mesh=(4,), after_forward={0: 2, 1: 2, 2: 2})
    ),
    "v2, two replicas of two shards": Case(under_v2(mesh=(2, 2)), microbatch=marked_last),
}
"""The same on four ranks."""


def storages(run: Run, way: str) -> list[list[tuple[int, torch.Tensor]]]:
    """Of each unit's parameters: where it lies unsharded, and that memory."""
    if way == "v2":
        groups = [group for layer in layers_of(run) for group in layer._parameter_groups]
        places = [unsharded_parameters(group)[0].data_ptr() for group in groups]
        buffers = [group._unsharded_model_weight.local_buffer for group in groups]
        return [[pair] for pair in zip(places, buffers, strict=True)]
    units = [own_groups(layer)[0].fsdp_params for layer in layers_of(run)]
    return [[(p._unsharded_param.data_ptr(), p.all_gather_outputs[0]) for p in u] for u in units]


def memory(way: str, inner: tuple[int, ...]) -> dict[str, Any]:
    """Where unsharded parameters lie while there are graphs, and what is left after them."""
    found: dict[str, Any] = {"sharded": []}

    def look(run: Run, step: int) -> None:
        if step == LATER:
            found["addresses"] = [[place for place, _ in unit] for unit in storages(run, way)]
            gc.collect()
            found["buffers"] = sum(type(one) is Buffer for one in gc.get_objects())

    def begins(model: Any, _last: bool) -> Any:
        held = next(iter(model.layers[0].parameters()))
        found["sharded"].append(isinstance(held, DTensor))
        return nullcontext()

    run = Run(Case(WRAPS[way], inner=inner, before_step=look, microbatch=begins))
    run.train(graphed=True)
    left = [buffer for unit in storages(run, way) for _, buffer in unit]
    found["held"] = sum(buffer.untyped_storage().nbytes() for buffer in left)
    return found


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except (BufferInUseError, ConfigurationError, HookError, ReplayMismatchError) as error:
        return str(error)
    return ""


def detached_later() -> None:
    """Units are unsharded at the same time only after the capture."""

    def change(run: Run, step: int) -> None:
        run.network.detached = step >= LATER

    Run(Case(under_fsdp2(), before_step=change)).train(graphed=True)


def taken_in_backward() -> None:
    """A unit is gathered in the backward pass while its buffer is in use."""

    def before(run: Run, step: int) -> None:
        if step != LATER:
            return
        groups = [group for layer in layers_of(run) for group in layer._parameter_groups]
        first, _, third = (group._unsharded_model_weight for group in groups)
        first.reallocate_storage()
        probe = torch.ones(1, requires_grad=True)
        probe.register_hook(lambda _gradient: third.reallocate_storage())
        try:
            probe.sum().backward()
        finally:
            first.release_storage()

    Run(Case(under_v2(), before_step=before)).train(graphed=True)


USED_LATER = WRAPS | {"v1, weights": under_v1(with_weights_used_twice)}


def used_later(wrap: Callable[[Network], Any]) -> None:
    """A hook uses what a unit uses twice, only after the capture."""

    def mix(layer: Any, given: Any, result: Any) -> Any:
        used = layer.up.weight if layer.down is layer.up else given[0]
        return result + used.mean() * used.sum()

    def before(run: Run, step: int) -> None:
        if step == LATER:
            layers_of(run)[1].register_forward_hook(mix, prepend=True)

    Run(Case(wrap, (WIDTH,) * 3, before_step=before)).train(graphed=True)


def refused() -> list[str]:
    network: Any = under_v2()(Network((16,)))
    inside = said(lambda: graph_units(network, ["layers.0.up"], backend="tape"))
    network.layers[0]._parameter_groups[0]._symm_mem_pool = object()
    symmetric = said(lambda: graph_units(network, ["layers.*"], backend="tape"))
    in_reverse = under_v2(prepare=lambda made: setattr(made, "layers", InReverse(made.layers)))
    order = said(lambda: Run(Case(in_reverse)).train(graphed=True))
    return [inside, symmetric, order]


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(case) for name, case in CASES.items()}
    found["memory"] = {
        "FSDP2": memory("FSDP2", (16, 16, 24)),
        "v2": memory("v2", (16, 16, 16, 16, 24)),
    }
    found["closed"] = [
        closed_while(Case(under_fsdp2()), unshard_first),
        closed_while(Case(under_fsdp2()), lambda run, _step: hold_all(run, LATER)),
        closed_while(Case(under_v2()), gather_first),
    ]
    found["in use"] = [said(detached_later), said(taken_in_backward)]
    found["refused"] = refused()
    wrap = under_fsdp2(mp_policy=IN_BF16)
    twice = Case(lambda network: wrap(with_weights_used_twice(network)), (WIDTH,) * 3)
    found["varying"] = said(lambda: Run(twice).train(graphed=True))
    found["outside"] = {way: said(partial(used_later, wrap)) for way, wrap in USED_LATER.items()}
    return found


def run_four() -> dict[str, Any]:
    return {name: trained(case) for name, case in OF_FOUR.items()}


def assert_as_eager(case: Case, rank: int, report: dict[str, Any]) -> None:
    """Whether a case had the bits of eager training, and its passes were replays or not."""
    assert report["equal"]
    counters = report["counters"]
    if case.counts is not None:
        assert counters | case.counts(rank) == counters
        return
    assert counters["captured"] >= 3 and counters["mismatched"] == 0
    assert counters["replayed"] >= counters["captured"] * (STEPS - WARMUP) * MICROBATCHES


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return on_ranks(run_all)


@pytest.fixture(params=[0, 1])
def report(request: pytest.FixtureRequest, reports: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = reports[request.param]
    return found


@pytest.mark.parametrize("name", CASES)
def test_graphs_train_the_same_bits(reports: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(reports):
        assert_as_eager(CASES[name], rank, found[name])


def test_graphs_train_the_same_bits_on_four_ranks() -> None:
    for rank, found in enumerate(on_ranks(run_four, 4)):
        for name, report in found.items():
            assert_as_eager(OF_FOUR[name], rank, report)


@pytest.mark.parametrize("way", WRAPS)
def test_a_verified_replay_compares_gradients_too(report: dict[str, Any], way: str) -> None:
    counters = report[f"{way}, evaluated, units of two shapes"]["counters"]
    assert counters["verified"] == counters["replayed"] > counters["outputs_only"] == 0
    assert counters["steps_verified"] > counters["steps_differed"] == 0


def test_every_part_of_the_fast_path_is_on(report: dict[str, Any]) -> None:
    for way, parts in {"v2": PARTS_OF_V2, "FSDP2": [], "DDP": []}.items():
        for name in CASES:
            on = parts if CASES[name].options.get("fast_path", True) else []
            assert not name.startswith(way) or report[name]["parts"] == on


def test_units_of_one_shape_share_their_unsharded_memory(report: dict[str, Any]) -> None:
    """Under v2 they alternate between two buffers."""
    one, two, other = report["memory"]["FSDP2"]["addresses"]
    assert one == two and not set(one) & set(other)
    one, two, three, four, other = (place for (place,) in report["memory"]["v2"]["addresses"])
    assert one == three and two == four and len({one, two, other}) == 3
    assert [report["memory"][way]["buffers"] for way in ("FSDP2", "v2")] == [2, 3]


@pytest.mark.parametrize("way", ["FSDP2", "v2"])
def test_memory_is_given_back_and_modules_hold_shards_between_steps(
    report: dict[str, Any], way: str
) -> None:
    memory = report["memory"][way]
    assert memory["held"] == 0
    assert memory["sharded"] == [True] * STEPS * MICROBATCHES


def test_graphs_are_closed_while_a_unit_is_unsharded(report: dict[str, Any]) -> None:
    assert report["closed"] == [True] * 3


def test_units_that_begin_to_need_one_buffer_end_the_run(report: dict[str, Any]) -> None:
    fsdp2, v2 = report["in use"]
    words = r"FSDP2 gathers layers\.1 while layers\.2 is inside of its backward pass"
    assert re.match(words, fsdp2) and "while another unit holds the buffer" in v2


def test_units_that_sum_gradients_in_varying_dtypes_are_refused(report: dict[str, Any]) -> None:
    words = "a parameter of shape (8,), used 2 times inside, has another reduce_"
    assert (words in report["varying"]) == FullyShard.varies_sums


@pytest.mark.parametrize("way", USED_LATER)
def test_what_is_used_outside_too_later_ends_the_run(report: dict[str, Any], way: str) -> None:
    what = r"a parameter of shape \(8, 8\)" if "weights" in way else "x"
    words = rf"layers\.1: .* is {what}, used several times inside and 2 times later outside"
    assert re.match(words, report["outside"][way])


def test_refusals_under_v2_name_the_unit_and_what_to_do(report: dict[str, Any]) -> None:
    inside, symmetric, order = report["refused"]
    assert "unit layers.0.up is a Linear without fully_shard of its own" in inside
    assert "unit layers.0 was sharded with use_symm_mem=True" in symmetric
    assert "units run in the order layers.2, layers.1, layers.0, and were registered" in order


class OfV2:
    """What a sharded module of v2 has, and what is done with it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self._context = name, said, self
        self.reduce_scatter_stream = f"for {name}"

    def pre_forward(self) -> None: ...

    def post_backward(self) -> None:
        self.said.append(self.name)

    def current_stream(self) -> Any:
        return SimpleNamespace(wait_stream=self.said.append)


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        (["one", "two"], ["one", "two", "for one"]),
        (["two", "one"], ["one", "two", "for one"]),
        (["two"], ["two", "for one"]),  # At the end of the pass.
    ],
)
def test_modules_of_a_unit_are_reduced_in_one_order(whole: list[str], expected: list[str]) -> None:
    said: list[str] = []
    modules = {name: OfV2(name, said) for name in ("one", "two")}

    def run(names: list[str], *, then: Callable[[], object] = lambda: None) -> None:
        for module in modules.values():
            module.pre_forward()
        x = torch.ones((), requires_grad=True)
        x.register_hook(lambda _: then())
        for name in reversed(names):
            x = x * 1
            end = modules[name].post_backward
            x.register_hook(lambda _, end=end: end())
        x.backward()

    undo = combine_undos(_in_order(list(modules.values())))
    with pytest.raises(ZeroDivisionError):
        run(["one"], then=lambda: 1 / 0)
    assert said == []
    run(whole)
    assert said == expected
    undo()
    modules["two"].post_backward()
    assert said == [*expected, "two"]
