"""Units of DTensors: tensor and sequence parallel, and FSDP2 or SimpleFSDP around them."""

from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module as parallelize
from torch.nn import functional as F

from megatron_cg.errors import CaptureError, ConfigurationError, ReplayMismatchError
from megatron_cg.units.find_units import find_units
from megatron_cg.units.graphs import GraphedUnits, graph_units
from megatron_cg.units.unsharded import find_sharding
from tests.unit.ranks import on_ranks

WIDTH, STEPS, WARMUP, MICROBATCHES = 6, 6, 2, 2
OTHER_BATCH, OTHER_PLACEMENT = 3, 4
"""Steps in which the first unit gets something else, so that it runs eagerly."""
NAMES = ("dp", "tp")
FLAGS = ("mask", "auxiliary", "residual", "frozen", "leaf", "verify")


class Block(nn.Module):
    """Norm and MLP, and what the flags of a program add."""

    def __init__(self, flags: dict[str, Any]) -> None:
        super().__init__()
        self.flags = flags
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Any, mask: Any = None) -> Any:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        y = y if mask is None else y * mask
        loss = (y * y).mean(-1) if self.flags["auxiliary"] else None
        return {"y": x + y if self.flags["residual"] else y, "mask": mask, "loss": loss}


def program(seed: int, ranks: int) -> dict[str, Any]:
    """What a network does, how its tensors are laid out, and what shards it besides."""
    draw = Random(seed)
    around = ["fsdp2", "simple"] if ranks == 4 else ["nothing", "nothing", "fsdp2", "simple"]
    return {flag: draw.random() < 0.5 for flag in FLAGS} | {
        "layout": draw.choice(["local", "replicated", "sequence"]),
        "around": draw.choice(around),
    }


def network(flags: dict[str, Any], mesh: DeviceMesh) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block(flags) for _ in range(2))
    layers[0].get_parameter("norm.weight").requires_grad_(not flags["frozen"])
    layout, tensor = flags["layout"], mesh["tp"]
    between = Shard(1) if layout == "sequence" else Replicate()
    for layer in layers:
        up = ColwiseParallel(input_layouts=between)
        # What it returns as a local tensor may be a collective that is not waited for yet.
        down = RowwiseParallel(output_layouts=between, use_local_output=layout == "local")
        parallelize(layer, tensor, {"up": up, "down": down})
        if layout == "sequence":
            parallelize(layer.get_submodule("norm"), tensor, SequenceParallel())
        elif layout == "replicated":
            distribute_module(layer.get_submodule("norm"), tensor)
    for part in (*layers,) if flags["around"] == "fsdp2" else ():
        fully_shard(part, mesh=mesh["dp"]).set_force_sum_reduction_for_comms(True)
    for module in (*layers.modules(),) if flags["around"] == "simple" else ():
        gathered_in_forward(module, mesh)
    return layers


def gathered_in_forward(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard its weights, and gather them at each access, as torchtitan's SimpleFSDP does."""
    own, dp = [*module.named_parameters(recurse=False)], mesh["dp"]
    for name, weight in own:
        placed: list[Any] = [Shard(0)]
        part, over = weight.detach(), dp
        if isinstance(weight, DTensor):
            part, over, placed = weight.to_local().detach(), mesh, [*placed, *weight.placements]
        part = part.chunk(dp.size())[dp.get_local_rank()]
        made = DTensor.from_local(part, over, placed)
        setattr(module, name, nn.Parameter(made, requires_grad=weight.requires_grad))
    names = {name: property(partial(gathered, dp, name)) for name, _ in own}
    module.__class__ = type(f"Simple{type(module).__name__}", (type(module),), names)


def gathered(dp: DeviceMesh, name: str, module: nn.Module) -> Any:
    """A weight for one use of it."""
    weight: Any = module._parameters[name]
    part = DTensor.from_local(weight.to_local(), dp, [Shard(0)])
    whole = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    if weight.device_mesh.ndim == 1:
        return whole
    return DTensor.from_local(whole, weight.device_mesh["tp"], weight.placements[1:])


def trained(flags: dict[str, Any], mesh: DeviceMesh, *, graphed: bool) -> list[Any]:
    layers, made = network(flags, mesh), list[Any]()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    mask = torch.rand(WIDTH)
    if flags["layout"] != "local":
        mask = distribute_tensor(mask, mesh["tp"], [Replicate()])
    verify = int(flags["verify"])
    graphs: Any = nullcontext()
    if graphed:
        graphs = graph_units(
            layers, "*", backend="tape", warmup_steps=WARMUP, verify_interval=verify
        )
    with graphs:
        for step in range(STEPS):
            with graphs.step() if graphed else nullcontext():
                for microbatch in range(MICROBATCHES):
                    x = given(flags, mesh, step, microbatch)
                    loss = loss_of(layers, x if flags["leaf"] else x * 2, mask)
                    loss.backward()
                    made += [loss.detach().clone(), x.grad]
            trained = [p for p in layers.parameters() if p.requires_grad]
            made += [p.grad.detach().clone() for p in trained if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*made, graphs.counters.as_dict() if graphed else {}]


def given(flags: dict[str, Any], mesh: DeviceMesh, step: int, microbatch: int) -> Any:
    """A batch, which tensor-parallel ranks have together."""
    seed = 10 * step + microbatch + 100 * mesh["dp"].get_local_rank()
    generator = torch.Generator().manual_seed(seed)
    x: Any = torch.randn(4 if step == OTHER_BATCH else 2, 4, WIDTH, generator=generator)
    layout: Any = {"sequence": Shard(1), "replicated": Replicate()}.get(flags["layout"])
    if layout == Replicate() and step == OTHER_PLACEMENT:
        layout = Shard(0)
    x = x if layout is None else distribute_tensor(x, mesh["tp"], [layout])
    return x.requires_grad_()


def loss_of(layers: Any, x: Any, mask: Any) -> torch.Tensor:
    losses: list[Any] = []
    for layer in layers:
        made = layer(x, **({"mask": mask} if layer.flags["mask"] else {}))
        x, losses = made["y"], [*losses, *([made["loss"]] * layer.flags["auxiliary"])]
    whole = [y.full_tensor() if isinstance(y, DTensor) else y for y in (x, *losses)]
    return torch.stack([(y * y).mean() for y in whole]).sum()


def compared(seeds: range, tensor: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=NAMES)
    said = []
    for seed in seeds:
        flags = program(seed, dist.get_world_size())
        *eager, _ = trained(flags, mesh, graphed=False)
        *replayed, counts = trained(flags, mesh, graphed=True)
        pairs = enumerate(zip(eager, replayed, strict=True))
        said.append([flags, [n for n, pair in pairs if not same(*pair)], counts])
    return said


def same(one: Any, two: Any) -> bool:
    placements = [getattr(each, "placements", None) for each in (one, two)]
    parts = [getattr(each, "_local_tensor", each) for each in (one, two)]
    return placements[0] == placements[1] and torch.equal(*parts)


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(6, 12)), (4, range(2, 5))])
def test_programs_of_dtensors_train_the_eager_numbers(ranks: int, seeds: range) -> None:
    for flags, different, counts in on_ranks(partial(compared, seeds, 2), ranks)[0]:
        assert not different, flags
        assert counts["captured"] == 2 and counts["replayed"] >= counts["eager"] > 0, flags


def test_the_gradient_of_a_result_is_laid_out_as_the_result(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(distribute_module(nn.Linear(2, 2), mesh))
    partial_sums, replicated = Partial(), Replicate()

    def step(graphs: GraphedUnits, *layouts: Any) -> None:
        with graphs.step():
            for layout in layouts:
                y: Any = model(distribute_tensor(torch.ones(2, 2), mesh))
                y.to_local(grad_placements=[layout]).sum().backward()

    with graph_units(model, "*", backend="tape", warmup_steps=1) as graphs:
        step(graphs, replicated, partial_sums)
        with pytest.raises(ConfigurationError, match=r"result 0 is \(Replicate.* or \(Partial"):
            step(graphs)
    with graph_units(model, "*", backend="tape", warmup_steps=1) as graphs:
        step(graphs, replicated)
        step(graphs, replicated)
        assert graphs.counters.backwards == 1
        with pytest.raises(ReplayMismatchError, match=r"result 0 was \(Replicate.*is \(Partial"):
            step(graphs, partial_sums)


class Multiplied(nn.Linear):
    """Its own code makes partial sums of the gradient of its replicated argument."""

    def forward(self, x: Any) -> Any:
        mesh = x.device_mesh
        own = x.to_local(grad_placements=[Partial()])
        return DTensor.from_local(F.linear(own, self.weight), mesh, [Replicate()])


def test_the_gradient_of_an_argument_is_laid_out_as_the_argument(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(Multiplied(2, 2, bias=False))
    with graph_units(model, "*", backend="tape", warmup_steps=1) as graphs:
        with graphs.step():
            x = distribute_tensor(torch.ones(2, 2), mesh).requires_grad_()
            model(x).to_local().sum().backward()
        wanted = r"argument x was \(Replicate.* and is \(Partial"
        with pytest.raises(CaptureError, match=wanted), graphs.step():
            pass


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_graphs_of_transformer_engine_have_no_weights_that_are_dtensors_in_the_unit(
    sharded: bool, distributed: bool, one_rank: None
) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(2, 2))
    if distributed:
        parallelize(model, mesh["tensor"], {"0": ColwiseParallel()})
    if sharded:
        for module in (model[0], model):
            fully_shard(module, mesh=mesh["data"])
    refused = pytest.raises(ConfigurationError, match=r'unit 0 are DTensors.*backend="native"')
    with refused if distributed else nullcontext():
        find_units(find_sharding(model), ["*"], "transformer_engine")
    assert find_units(find_sharding(model), ["*"], "native")
