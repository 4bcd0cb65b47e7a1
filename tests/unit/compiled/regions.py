"""Regions of Megatron's local spec, on the meta device to be saved and on a rank to be loaded.

The functional tests train them on GPUs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg import graph_units
from megatron_cg.compiled.load import Precompiled, load
from megatron_cg.compiled.region import Region, megatron_groups
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.replay.verify import bytes_of
from megatron_cg.tape.tape_backend import TapeBackend

WORLD = 4
_ROWS, _BATCH, _HIDDEN = 8, 2, 32
MOE: dict[str, Any] = {
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
STATIC = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": _HIDDEN,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**{**fields, **options})


def with_groups(settings: Any, device: str) -> None:
    """Make Megatron's groups, and seed the weights, which are the same in each process."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        settings.tensor_model_parallel_size,
        expert_model_parallel_size=settings.expert_model_parallel_size,
        create_gloo_process_groups=False,
    )
    if device != "meta":
        graphs = device.startswith("cuda")
        random.model_parallel_cuda_manual_seed(
            1, use_cudagraphable_rng=graphs, force_reset_rng=True
        )
        torch.manual_seed(3)


def local_layer(settings: Any, device: str = "meta") -> Any:
    """A layer of Megatron's local spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    with_groups(settings, device)
    spec = get_gpt_layer_local_spec(settings.num_moe_experts)
    with torch.device(device):
        return build_module(spec, config=settings).to(device)


def hidden_states(settings: Any, device: str, seed: int = 5) -> torch.Tensor:
    rows = _ROWS // (settings.tensor_model_parallel_size if settings.sequence_parallel else 1)
    if device != "meta":
        torch.manual_seed(seed)
    shape = rows, _BATCH, settings.hidden_size
    return torch.randn(*shape, device=device, requires_grad=True)


def layer(settings: Any, device: str = "meta", seed: int = 5) -> Region:
    """A layer of Megatron's local spec."""
    made, given = local_layer(settings, device), hidden_states(settings, device, seed)
    mask = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=device).triu(1)[None, None]
    return Region(made, (given,), {"attention_mask": mask}, megatron_groups(), settings)


class Layers(torch.nn.Module):
    """The modules of some regions, one behind the other.

    No input of one is used outside of it too: autograd would add the gradients in another order.
    """

    def __init__(self, regions: list[Region]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(region.module for region in regions)
        self.options = regions[0].kwargs

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden, **self.options)
        return hidden


def llama(device: str = "meta") -> Region:
    """For GPUs: the CPU has no kernel of RMSNorm."""
    return transformer_layer(device, normalization="RMSNorm")


def transformer_layer(
    device: str = "meta", seed: int = 5, normalization: str = "LayerNorm"
) -> Region:
    """A layer of Llama's form."""
    settings = config(
        tensor_model_parallel_size=2,
        num_query_groups=2,
        normalization=normalization,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
    )
    return layer(settings, device, seed)


def sequence_parallel_mlp(device: str = "meta", seed: int = 5) -> Region:
    """All-gather and reduce-scatter, asynchronous ones in the backward pass."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    settings = config(tensor_model_parallel_size=2, sequence_parallel=True)
    with_groups(settings, device)
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = megatron_groups()
    with torch.device(device):
        mlp = MLP(settings, parts, tp_group=groups["tp"]).to(device)
    return Region(mlp, (hidden_states(settings, device, seed),), {}, groups, settings)


def gathered_linear(device: str = "meta", seed: int = 5) -> Region:
    """Its backward pass takes the columns of the rank, so its code is not that of another."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    settings = config(tensor_model_parallel_size=2)
    with_groups(settings, device)
    groups = megatron_groups()
    with torch.device(device):
        linear = ColumnParallelLinear(
            *(_HIDDEN, 16),
            config=settings,
            init_method=settings.init_method,
            gather_output=True,
            tp_group=groups["tp"],
        ).to(device)
    return Region(linear, (hidden_states(settings, device, seed),), {}, groups, settings)


class Plain(torch.nn.Module):
    """Runs a function on a group between two linear layers."""

    def __init__(self, body: Callable[..., Any], group: Any = None) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.body, self.group = body, group

    def forward(self, given: torch.Tensor) -> Any:
        return self.body(self.first(given), self)


def region(body: Callable[..., Any], *, named: bool = True, device: str = "meta") -> Region:
    group = dist.new_group([0, 1])
    with torch.device(device):
        module, given = Plain(body, group), torch.randn(4, 4, requires_grad=True)
    return Region(module, (given,), {}, {"pair": group} if named else {})


def of(body: Callable[..., Any], **options: Any) -> Callable[[], Region]:
    return lambda: region(body, **options)


REGIONS: dict[str, Callable[..., Region]] = {
    "layer": transformer_layer,
    "mlp": sequence_parallel_mlp,
}
"""By the name of their artifact."""

STEPS, WARMUP = 5, 2
REPLAYS = 2 * (STEPS - WARMUP)
"""Of two layers, each with a graph."""


def trained(
    build: Callable[[str], Region], how: str, device: str, load_one: Callable[[Region], Precompiled]
) -> tuple[list[torch.Tensor], int]:
    """Losses and weights of two layers; ``graphs`` captures the loaded code. Counts replays."""
    regions = [build(device) for _ in range(2)]
    model = Layers(regions)
    if how != "eager":
        load_one(regions[0]).attach(model.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    graphed: Any = nullcontext()
    if how == "graphs":
        backend: Any = TapeBackend() if device == "cpu" else "native"
        graphed = graph_units(model, ["layers.*"], warmup_steps=WARMUP, backend=backend)
    with graphed as graphs:
        for number in range(STEPS):
            with graphs.step() if graphs is not None else nullcontext():
                optimizer.zero_grad()
                torch.manual_seed(number)
                given = torch.randn_like(regions[0].args[0]).requires_grad_()
                loss = model(given).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().clone())
        replays = 0 if graphs is None else graphs.counters.replayed
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())], replays


def captured(
    folder: Path, name: str, build: Callable[[str], Region], votes: Agreement, device: str = "cpu"
) -> dict[str, list[int]]:
    """Whether training with loaded code, also in graphs, has the bits of eager; and replays."""

    def load_one(region: Region) -> Precompiled:
        return load(folder, name, region, votes)

    eager, _ = trained(build, "eager", device, load_one)
    found = {}
    for how in ("compiled", "graphs"):
        values, replays = trained(build, how, device, load_one)
        pairs = zip(eager, values, strict=True)
        same = all(torch.equal(bytes_of(one), bytes_of(two)) for one, two in pairs)
        found[how] = [same, replays]
    return found
