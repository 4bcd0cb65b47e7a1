"""Train a transformer of plain PyTorch, eagerly or with graphs, sharded in a way of your choice.

No megatron-core is needed, and no megatron-fsdp but for its own sharding. On GPUs the graphs are
CUDA graphs by torch alone, or with --backend te by Transformer Engine. Without a GPU, two processes
train over gloo, with tapes instead.

    torchrun --nproc-per-node 2 examples/standalone_transformer.py --graphs
    torchrun --nproc-per-node 2 examples/standalone_transformer.py --compare --sharding fsdp2
    python examples/standalone_transformer.py --compare          # without a GPU
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

HEADS = 4


class Block(nn.Module):
    """Causal attention and MLP, each behind a norm: (batch, sequence, hidden) in and out."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
        """``causal`` is no tensor: a graph holds the value that it was captured with."""
        batch, sequence, hidden = x.shape
        shape = (batch, sequence, 3, HEADS, hidden // HEADS)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return y


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, hidden: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList(Block(hidden, dropout) for _ in range(layers))
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) of int64 to (batch, sequence, 256)."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for layer in self.layers:
            x = layer(x, causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def under_megatron_fsdp(network: Transformer, device: str) -> tuple[Any, Any]:
    """The network under the standalone Megatron-FSDP, and its optimizer."""
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    model = fully_shard_model(
        network,
        fsdp_unit_modules=[Block],
        # Both keep unsharded parameters where they were at capture.
        fsdp_double_buffer=True,
        fsdp_db_use_persist_buf_on_alloc_fail=True,
        # Sums gradients over ranks: gloo cannot scale as it reduces.
        calculate_per_token_loss=True,
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def under_megatron_fsdp_v2(network: Transformer, device: str) -> tuple[Any, Any]:
    """The network under Megatron-FSDP v2, and its optimizer."""
    from megatron_fsdp.experimental import Flat, Placements, fully_shard, fully_shard_optimizer
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    placements = Placements(["dp"], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
    for layer in network.layers:
        fully_shard(layer, mesh, placements)
    fully_shard(network, mesh, placements)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    fully_shard_optimizer(optimizer)
    return network, optimizer


def under_fsdp2(network: Transformer, device: str) -> tuple[Any, Any]:
    """The network under torch's ``fully_shard``, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network, torch.optim.AdamW(network.parameters(), lr=1e-3)


def under_ddp(network: Transformer, device: str) -> tuple[Any, Any]:
    """The network under DistributedDataParallel, and its optimizer."""
    model = nn.parallel.DistributedDataParallel(network)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


SHARDINGS = {
    "megatron-fsdp": under_megatron_fsdp,
    "megatron-fsdp-v2": under_megatron_fsdp_v2,
    "fsdp2": under_fsdp2,
    "ddp": under_ddp,
}


def ranks_summed(sharding: str) -> int:
    """How many ranks' gradients the sharding adds; the others average them by themselves."""
    return dist.get_world_size() if sharding == "megatron-fsdp" else 1


def build(args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """The sharded model and its optimizer, the same in every run."""
    torch.manual_seed(args.seed)
    network = Transformer(args.layers, args.hidden, args.sequence, args.dropout).to(device)
    model, optimizer = SHARDINGS[args.sharding](network, device)
    # Dropout differs between ranks, and is the same in both runs.
    torch.manual_seed(args.seed + 1 + dist.get_rank())
    return model, optimizer


def batch_of(args: argparse.Namespace, number: int, device: str) -> torch.Tensor:
    """(batch, sequence + 1) bytes of Python's own library, other ones on each rank and step."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    first = (number * dist.get_world_size() + dist.get_rank()) * args.batch * args.sequence
    starts = (first + torch.arange(args.batch) * args.sequence) % (len(text) - args.sequence - 1)
    return text[starts[:, None] + torch.arange(args.sequence + 1)].to(device)


def train(args: argparse.Namespace, device: str, *, graphed: bool) -> list[torch.Tensor]:
    """The mean losses of all steps, then this rank's part of every parameter."""
    from contextlib import nullcontext

    from megatron_cg import graph_units
    from megatron_cg.tape.tape_backend import TapeBackend

    model, optimizer = build(args, device)
    summed = ranks_summed(args.sharding)
    losses = []
    graphs: Any = nullcontext()
    if graphed:
        backend = args.backend if device == "cuda" else TapeBackend()
        graphs = graph_units(model, ["layers.*"], warmup_steps=args.warmup, backend=backend)
    with graphs:
        for step in range(args.steps):
            with graphs.step() if graphed else nullcontext():
                optimizer.zero_grad()
                total = torch.zeros((), device=device)
                for microbatch in range(args.microbatches):
                    tokens = batch_of(args, step * args.microbatches + microbatch, device)
                    logits = model(tokens[:, :-1]).float()
                    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                    loss = loss / args.microbatches
                    (loss / summed).backward()
                    total += loss.detach()
                optimizer.step()
            dist.all_reduce(total)
            total /= dist.get_world_size()
            losses.append(total)
            if dist.get_rank() == 0:
                print(f"step {step} loss {float(total):.6f}", flush=True)
        if graphed and dist.get_rank() == 0:
            print(f"counters: {graphs.counters.as_dict()}", flush=True)
    shards = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
    return [*losses, *(shard.detach().clone() for shard in shards)]


def compare(args: argparse.Namespace, device: str) -> None:
    """Train eagerly, then with graphs; print whether all is equal, and exit with 1 if not."""
    eager, graphed = (train(args, device, graphed=graphs) for graphs in (False, True))
    different = [n for n, (a, b) in enumerate(zip(eager, graphed, strict=True)) if not equal(a, b)]
    count = torch.tensor(len(different), device=device)
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        print(f"losses of {args.steps} steps and all parameter shards: ", end="")
        print(f"{int(count)} differ" if count else "bitwise equal", flush=True)
    if count:
        raise SystemExit(1)


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Bit for bit; NaN equals NaN."""
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (one, two)))


def run(args: argparse.Namespace, device: str) -> None:
    """What the flags ask for, in a process whose group is there."""
    torch.use_deterministic_algorithms(True)
    if args.compare:
        compare(args, device)
    else:
        train(args, device, graphed=args.graphs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in the processes of torchrun on GPUs, or in two of our own without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", action="store_true", help="capture after --warmup steps")
    parser.add_argument("--compare", action="store_true", help="eagerly and with graphs")
    numbers = {"steps": 8, "warmup": 3, "microbatches": 2, "batch": 2, "seed": 1}
    numbers |= {"layers": 4, "hidden": 64, "sequence": 32, "processes": 2}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", choices=("native", "te"), default="native", help="on GPUs")
    parser.add_argument("--sharding", choices=SHARDINGS, default="megatron-fsdp")
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        from megatron_cg.tape.launch import run_processes

        run_processes(partial(run, args, "cpu"), args.processes)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    try:
        run(args, "cuda")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
