"""What cannot become a graph is refused before anything is changed; which ranks train together."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel as Megatrons
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.consensus.decision import AgreementError, Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArgumentError, ConfigurationError, HookError, Violation
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.units import graphs
from megatron_cg.units.graphs import graph_units
from tests.unit.ranks import on_ranks
from tests.unit.units import plain
from tests.unit.units.sharded import Run, v1_run

pytest.importorskip("megatron_fsdp")


def refused(model: nn.Module, units: list[Any], **options: Any) -> Sequence[Violation]:
    with pytest.raises(ConfigurationError) as error:
        graph_units(model, units, **{"backend": "tape"} | options)
    return error.value.violations


def rules_of(run: Run, units: list[Any], **options: Any) -> list[str]:
    return [violation.rule for violation in refused(run.model, units, **options)]


def test_units_are_refused_for_every_reason_at_once(one_rank: None) -> None:
    run = v1_run(fsdp_double_buffer=False, fsdp_db_use_persist_buf_on_alloc_fail=False)
    layer: Any = run.network.layers[1]
    layer.up.fuse_wgrad_accumulation = True
    units = ["layers.7", nn.Conv2d, nn.Conv2d(1, 1, 1), "head", "layers", "layers.*"]
    rules = "fsdp-double-buffer fsdp-db-use-persist-buf-on-alloc-fail no-fsdp-unit "
    rules += "gradient-accumulation-fusion"
    assert rules_of(run, units) == [*["no-such-unit"] * 4, *rules.split()]


def test_a_star_stands_for_one_part_of_a_name(one_rank: None) -> None:
    run = v1_run()
    assert rules_of(run, ["embed*", "h*"]) == ["no-fsdp-unit", "no-fsdp-unit"]
    with run.with_graphs(["la*.[12]"]) as graphs:
        run.step()
        assert list(graphs._units) == ["layers.1", "layers.2"]


def test_what_may_be_meant_is_to_be_typed() -> None:
    inner = {"embed": nn.Linear(2, 2), "layers": nn.ModuleList([nn.Linear(2, 2)])}
    model = nn.ModuleDict({"model": nn.ModuleDict(inner)})
    for units in ("layers", "layers.*", "model.*", nn.ModuleList):
        with pytest.raises(ConfigurationError, match=r'Remedy: type "model\.layers\.\*"'):
            graph_units(model, units, backend="tape")


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_old_weights_are_refused(strategy: str, one_rank: None) -> None:
    """Weights that are all sharded are gathered in each pass."""
    run = v1_run(zero_dp_strategy=strategy, overlap_param_gather=False)
    assert rules_of(run, ["layers.*"]) == ["old-weights"]
    with v1_run(overlap_param_gather=False).with_graphs():
        pass


def test_megatrons_own_data_parallel_is_refused() -> None:
    wrapped = Megatrons.__new__(Megatrons)  # Without process groups.
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    with pytest.raises(
        HookError, match=r"DistributedDataParallel of megatron\.core.* would be lost"
    ):
        graph_units(wrapped, ["module"], backend="tape")


def test_no_string_selects_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    with graph_units(model, "*", backend="tape") as graphs:
        assert list(graphs._units) == ["0", "1"]
    with pytest.raises(ConfigurationError, match="contains 0"):
        graph_units(model, [model, "*"], backend="tape")


def test_expandable_segments_are_refused_where_graphs_are_cuda_graphs(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run = v1_run()
    cuda = TapeBackend()
    cuda.name = "transformer_engine"
    assert rules_of(run, ["layers.*"], backend=cuda) == ["expandable-segments"]
    run.with_graphs().close()


def test_a_model_that_is_wrapped_twice_is_refused(one_rank: None) -> None:
    inside = nn.Sequential(DistributedDataParallel(nn.Linear(1, 1)), v1_run().model)
    with pytest.raises(HookError, match="by Megatron-FSDP and DistributedDataParallel"):
        graph_units(inside, ["0"], backend=TapeBackend())


def sharded(*modules: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for module in modules:
        fully_shard(module, mesh=mesh)


def test_fsdp2_units_without_parameters_or_with_units_inside_are_refused(one_rank: None) -> None:
    inner = nn.Linear(1, 1)
    outer = nn.Sequential(nn.Tanh(), nn.Sequential(inner))
    model = nn.Sequential(nn.Tanh(), outer, nn.Linear(1, 1))
    sharded(inner, model[0], outer, model[2], model)
    violations = refused(model, ["*.*", "0", "1", "2"])
    found = {one.rule: one.found for one in violations}
    rules = "fsdp2-no-parameters fsdp2-sharded-inside nested-units".split()
    assert [one.rule for one in violations] == [*["no-fsdp-unit"] * 2, *rules]
    assert "unit 0 is a FSDPTanh without parameters of its own" in found["fsdp2-no-parameters"]
    assert found["fsdp2-sharded-inside"] == "fully_shard was called on 1.0 in unit 1 too"


class Penalized(nn.Linear):
    """Takes a gradient in another thread, as backward passes on a GPU run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.detach().requires_grad_()
        energy = super().forward(inner).square().sum()
        with ThreadPoolExecutor(1) as pool:
            grad = pool.submit(torch.autograd.grad, energy, inner, create_graph=True).result()
        return x + grad[0]


def test_a_gradient_that_fsdp2_reduces_a_step_late_is_refused(one_rank: None) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), Penalized(2, 2))
    sharded(model[1], model)
    model[1].set_reshard_after_backward(False)
    graphs, late = graph_units(model, ["1"], backend="tape"), "The gradient of 1.weight came when"
    with graphs, pytest.raises(HookError, match=late):
        while graphs.counters.replayed == 0:
            with graphs.step():
                model(torch.ones(3, 2)).sum().backward()


@pytest.mark.parametrize("around", [True, False])
def test_fsdp2_units_are_named_in_the_module_around_all_that_is_sharded(
    around: bool, one_rank: None
) -> None:
    model = nn.Sequential()
    for name in ("encoder", "decoder"):
        model.add_module(name, half := nn.Sequential(nn.Linear(1, 1)))
        sharded(half[0], half)
    if around:
        sharded(model)
    prefix = "" if around else "0."
    with graph_units(nn.Sequential(model), f"{prefix}*.0", backend="tape") as graphs:
        assert list(graphs._units) == [f"{prefix}encoder.0", f"{prefix}decoder.0"]


@pytest.mark.parametrize("compiled", ["unit", "in place", "model"])
def test_a_unit_that_torch_compiles_is_refused(compiled: str) -> None:
    """Nothing is compiled here: Dynamo waits for the first call."""
    unit: Any = nn.Sequential(nn.Linear(2, 2))
    if compiled == "in place":
        unit.compile()
    inner: Any = torch.compile(unit) if compiled == "unit" else unit
    model: Any = nn.Sequential(inner)
    if compiled == "model":
        model.compile()
    (found,) = refused(model, ["0"])
    what = "the model" if compiled == "model" else "0"
    assert found.rule == "compiled-unit"
    assert found.found == f"unit 0: {what} is compiled by torch.compile"


@pytest.mark.parametrize("step", [1, plain.WARMUP + 1])
def test_a_unit_that_torch_compiles_later_is_refused(step: int) -> None:
    def before(run: plain.Training) -> None:
        if run.step == step:
            run.model[0].compile(backend="eager")

    plain.refused(ConfigurationError, "compiled-unit", plain.units, plain.train, 1, before)


TRAINED = 4


def made_of(**given: Any) -> Any:
    return graph_units(nn.Sequential(nn.Linear(4, 4)), "*", backend="tape", **given)


def call_on_one_rank() -> str:
    vars(graphs)["Agreement"] = partial(Agreement, timedelta(seconds=1))
    said = ""
    if dist.get_rank() == 2:
        try:
            made_of()
        except AgreementError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_that_comes_alone_learns_which_ranks_did_not() -> None:
    *others, said = on_ranks(call_on_one_rank, 3)
    assert said.startswith("ranks 0, 1 did not come here within 1 seconds of rank 2: ")
    assert "graph_units(..., group=GROUP)" in said and others == ["", ""]


def train_on_some_ranks() -> list[Any]:
    """In one process of three: the last two train, and are in other groups as well."""
    rank = dist.get_rank()
    trainers, _ = dist.new_group([1, 2]), dist.new_group([0, 2])
    if rank == 0:
        with pytest.raises(ArgumentError, match="with this rank in it"):
            made_of(group=trainers)
        dist.barrier()
        return []
    model = nn.Sequential(nn.Linear(4, 4))
    with graph_units(model, "*", backend="tape", warmup_steps=1, group=trainers) as made:
        for step in range(TRAINED):
            with made.step():
                model(torch.ones(2 + (rank == 2 and step == 2), 4)).sum().backward()
        counts = made.counters
    votes = Agreement(group=trainers)
    asked = votes.agree(Kind.DELETION, Vote(against=rank == 2)).against
    with pytest.raises(AgreementError) as mixed:
        votes.agree(Kind.DELETION, Vote(), serial=rank)
    dist.barrier()
    return [counts.replayed, counts.eager, asked, str(mixed.value).partition(". ")[0]]


def test_ranks_that_do_not_train_are_not_waited_for() -> None:
    none, first, second = on_ranks(train_on_some_ranks, 3)
    words = "ranks came to different votes: deletion 1 on rank 1, deletion 2 on rank 2"
    assert none == []
    assert first == [3, 0, [2], words] and second == [2, 1, [2], words]


def test_a_group_is_one_of_this_rank(one_rank: None) -> None:
    for group in ("world", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ArgumentError, match="a process group of torch"):
            made_of(group=group)
    made_of(group=dist.group.WORLD).close()
