"""A network under each way of sharding, trained eagerly and with graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from megatron_fsdp import experimental as v2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import placement_types
from torch.nn.parallel import DistributedDataParallel

from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.units.graphs import GraphedUnits, graph_units

VOCABULARY, WIDTH, LENGTH = 16, 8, 5
WARMUP, STEPS, MICROBATCHES = 1, 4, 2
LATER = WARMUP + 1
"""A step after the capture."""
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Norm, MLP and dropout with a residual, a flag, and a parameter of its own."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.broken = False

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        if vars(self)["broken"]:  # So it may read any name.
            raise ArithmeticError
        hidden = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        y: torch.Tensor = x * self.scale + (2 if double else 1) * hidden
        return y


class Network(nn.Module):
    """Tokens in, logits out; layers are called in an order, or in their own."""

    def __init__(self, inner: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(map(Block, inner))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.detached = self.doubled = False
        self.order: list[int] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        made = []
        layers: Any = list(self.layers)
        for layer in layers if self.order is None else [layers[n] for n in self.order]:
            x = layer(x.detach() if self.detached else x, self.doubled)
            made.append(x)
        logits: torch.Tensor = self.head(sum(made) if self.detached else x)
        return logits


def under_fsdp2(
    *,
    mesh: tuple[int, ...] = (2,),
    after_forward: Mapping[int, bool | int] | None = None,
    around: bool = True,
    **options: Any,
) -> Callable[[Network], Any]:
    """``fully_shard`` on each layer, and on the whole or (not ``around``) on each other module.

    ``after_forward`` is a layer's choice.
    """

    def wrap(network: Network) -> Any:
        names = ("replicate", "shard")[-len(mesh) :]
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        for number, layer in enumerate(network.layers):
            own = (after_forward or {}).get(number)
            fully_shard(layer, mesh=device_mesh, reshard_after_forward=own, **options)
        for part in (network,) if around else (network.embed, network.head):
            fully_shard(part, mesh=device_mesh, **options)
        return network

    return wrap


IN_CONTEXT = hasattr(v2, "fully_shard_context")
"""Whether megatron-fsdp is that of Megatron-LM's main."""
PLACED: Any = placement_types if IN_CONTEXT else v2
FLAT = PLACED.Shard(0) if IN_CONTEXT else PLACED.Flat()
AVERAGED = PLACED.Partial("avg" if IN_CONTEXT else dist.ReduceOp.AVG)
OF_ONE_AXIS = v2.Placements(["shard"], parameter=[FLAT], gradient=[FLAT], optimizer=[FLAT])
ZERO_1 = {"parameter": [PLACED.Replicate()], "gradient": [AVERAGED]}
ZERO_2 = {"parameter": [PLACED.Replicate()]}
HYBRID = v2.Placements(
    ["replicate", "shard"],
    parameter=[PLACED.Replicate(), FLAT],
    gradient=[AVERAGED, FLAT],
    optimizer=[PLACED.Replicate(), FLAT],
)


def under_v2(
    *,
    prepare: Callable[[Network], object] = lambda _network: None,
    mesh: tuple[int, ...] = (2,),
    root: bool = True,
    inside: bool = False,
    placed: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[Network], Any]:
    """v2's ``fully_shard`` on each layer and, unless ``root`` is False, on the whole.

    With ``inside`` also on a module in each layer. ``placed`` replaces placements.
    """

    def wrap(network: Network) -> Any:
        prepare(network)
        names = ("replicate", "shard")[-len(mesh) :]
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        placements = replace(HYBRID if len(mesh) > 1 else OF_ONE_AXIS, **placed)
        parts = [layer.get_submodule("up") for layer in network.layers if inside]
        with v2.fully_shard_context() if IN_CONTEXT else nullcontext():
            for part in (*parts, *network.layers, *([network] if root else ())):
                v2.fully_shard(part, device_mesh, placements)
        return network

    return wrap


def under_v1(
    prepare: Callable[[Network], object] = lambda _network: None, **options: Any
) -> Callable[[Any], Any]:
    """Megatron-FSDP's ``fully_shard_model`` with these options, and what graphs need."""

    def wrap(network: Any) -> Any:
        prepare(network)
        needed = {
            "fsdp_unit_modules": [type(network.layers[0])],
            "fsdp_double_buffer": True,
            "fsdp_db_use_persist_buf_on_alloc_fail": True,
            "calculate_per_token_loss": True,
        }
        return fully_shard_model(network, **(needed | options))

    return wrap


def under_ddp(**options: Any) -> Callable[[Network], Any]:
    return lambda network: DistributedDataParallel(network, **options)


@dataclass(frozen=True)
class Case:
    wrap: Callable[[Network], Any]
    inner: tuple[int, ...] = (16, 16, 16)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``graph_units``."""
    before_step: Callable[[Run, int], object] = lambda _run, _step: None
    microbatch: Callable[[Any, bool], Any] = lambda _model, _last: nullcontext()
    """A context for the passes of a microbatch; it is told whether the microbatch is the last."""
    detached: bool = False
    """Whether no input of a unit needs a gradient."""
    counts: Callable[[int], dict[str, int]] | None = None
    """What a rank counts; None if every pass after the capture is a replay."""


class Run:
    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.network = case, Network(case.inner)
        self.network.detached, self.rows = case.detached, 3
        self.model = case.wrap(self.network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if isinstance(self.model, MegatronFSDP):
            self.optimizer = fully_shard_optimizer(self.optimizer)
        elif any(hasattr(layer, "_parameter_groups") for layer in self.network.layers):
            v2.fully_shard_optimizer(self.optimizer)
        self.graphs: GraphedUnits | None = None
        self.losses: list[torch.Tensor] = []
        self.steps = 0
        torch.manual_seed(1)

    def train(
        self,
        steps: int = STEPS,
        *,
        graphed: bool = False,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Train, with graphs that are closed at the end or without; dropout differs by rank.

        ``then`` is called before graphs are closed.
        """
        torch.manual_seed(1 + dist.get_rank())
        if not graphed:
            for _ in range(steps):
                self.step(MICROBATCHES)
            return
        options = {"warmup_steps": WARMUP, "backend": "tape", **self.case.options}
        with graph_units(self.model, ["layers.*"], **options) as self.graphs:
            for _ in range(steps):
                self.step(MICROBATCHES)
            then()

    def with_graphs(self, units: Sequence[Any] = ("layers.*",), **options: Any) -> GraphedUnits:
        options = {"warmup_steps": 1, "backend": TapeBackend(), **options}
        self.graphs = graph_units(self.model, units, **options)
        return self.graphs

    def step(self, microbatches: int = 1) -> torch.Tensor:
        self.case.before_step(self, self.steps)
        passes = partial(self.passes, microbatches)
        with self.graphs.step() if self.graphs is not None else nullcontext():
            losses = passes() if self.graphs is None else self.graphs.verified(passes)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1
        self.losses += losses
        return torch.stack(losses)

    def passes(self, microbatches: int) -> list[torch.Tensor]:
        losses = []
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            self.model.later = self.steps >= LATER
            with self.case.microbatch(self.model, last):
                loss = self.loss(self.steps * microbatches + microbatch)
                loss.backward()
            losses.append(loss.detach().clone())
        return losses

    def loss(self, number: int = 0) -> torch.Tensor:
        seed = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (self.rows, LENGTH), generator=seed)
        logits = self.model(tokens).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def tensors(self) -> Iterator[torch.Tensor]:
        """All losses, then this rank's part of every parameter and of its moments."""
        yield from self.losses
        for parameter in self.optimizer.param_groups[0]["params"]:
            for one in (parameter, *self.optimizer.state[parameter].values()):
                yield getattr(one, "_local_tensor", one).detach().clone()


def v1_run(**options: Any) -> Run:
    return Run(Case(under_v1(**options)))


def evaluate(run: Run, step: int) -> None:
    """A forward pass in evaluation mode, whose loss is kept too."""
    if step in {1, LATER}:
        run.model.eval()
        with torch.no_grad():
            run.losses.append(run.loss(10_000))
        run.model.train()


def save_and_load(run: Run, step: int) -> None:
    if step == LATER:
        state = {name: value.clone() for name, value in run.model.state_dict().items()}
        for value in run.model.state_dict().values():
            value.zero_()
        run.model.load_state_dict(state)


def without_sync(model: Any, last: bool) -> Any:
    """Gradients are reduced with the last microbatch alone."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()


def marked_last(model: Any, last: bool) -> Any:
    """v2 reduces gradients over replicas with the last microbatch."""
    return v2.microbatch(model.context if IN_CONTEXT else model, last)


def unsharded_in_between(model: Any, last: bool) -> Any:
    """As above, and units are resharded after the last backward pass alone."""
    model.set_reshard_after_backward(last)
    return without_sync(model, last)


@cache
def eager(**case: Any) -> Run:
    """An eager run, one for all cases that differ in nothing but their graphs."""
    run = Run(Case(**case))
    run.train()
    return run


def trained(case: Case) -> dict[str, Any]:
    run, parts = Run(case), []

    def look() -> None:
        session = run.graphs.session if run.graphs is not None else None
        if session is not None and session.fast_path is not None:
            parts.extend(session.fast_path.parts)

    run.train(graphed=True, then=look)
    assert run.graphs is not None
    alike = {name: one for name, one in vars(case).items() if name not in ("options", "counts")}
    counters = run.graphs.counters.as_dict()
    return {"equal": equal(eager(**alike), run), "counters": counters, "parts": parts}


def closed_while(case: Case, unsharded: Callable[[Run, int], object]) -> bool:
    """Whether training goes on as an eager run does after graphs were closed in that state."""
    plain, graphed = Run(case), Run(case)
    plain.train()
    graphed.train(graphed=True, then=lambda: unsharded(graphed, STEPS))
    unsharded(plain, STEPS)
    graphed.graphs = None
    for run in (plain, graphed):
        run.train(1)
    return equal(plain, graphed)


def equal(one: Run, two: Run) -> bool:
    pairs = list(zip(one.tensors(), two.tensors(), strict=True))
    return all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
