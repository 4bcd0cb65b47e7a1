"""torchtitan's Llama 3 under its own FSDP2, trained eagerly and with graphs, bit for bit.

    torchrun --nproc-per-node 2 tests/functional/titan_model.py   # without GPUs: tapes

Model and ``apply_fsdp`` are those of torchtitan 0.2.2; the loop is as small as can be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from megatron_cg import graph_units

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
STEPS, MICROBATCHES, EVALUATED = 12, 2, 7
WIDTH, LENGTH = (1024, 512) if GPU else (64, 32)


def build() -> Any:
    """The model in BF16, sharded over all ranks."""
    torch.manual_seed(0)
    shape = TransformerModelArgs(dim=WIDTH, n_layers=3, n_heads=8, vocab_size=256, max_seq_len=512)
    model = Transformer(shape).to(DEVICE)
    with torch.no_grad():
        model.init_weights()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not GPU:
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it reduces.
    return model


def loss_of(model: Any, number: int) -> torch.Tensor:
    """The loss on a batch of this rank."""
    seed = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    tokens = torch.randint(0, 256, (2, LENGTH + 1), generator=seed).to(DEVICE)
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def train(*, graphed: bool) -> Iterator[torch.Tensor]:
    """All losses and gradient norms, an evaluation, then this rank's shards."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graphs: Any = nullcontext()
    if graphed:
        graphs = graph_units(model, ["layers.*"], backend="native" if GPU else "tape")
    with graphs:
        for step in range(STEPS):
            with graphs.step() if graphed else nullcontext():
                for microbatch in range(MICROBATCHES):
                    loss = loss_of(model, step * MICROBATCHES + microbatch)
                    loss.backward()
                    yield loss.detach().clone()
                yield torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
                optimizer.step()
                optimizer.zero_grad()
            if step == EVALUATED:
                model.eval()
                with torch.no_grad():
                    yield loss_of(model, 10_000)
                model.train()
        if graphed and dist.get_rank() == 0:
            print(f"counters: {graphs.counters.as_dict()}", flush=True)
    for parameter in model.parameters():
        yield parameter.to_local().detach().clone()


def main() -> None:
    """Compare; exit with 1 if anything differs on any rank."""
    torch.use_deterministic_algorithms(True)
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPU else "gloo")
    eager, graphed = list(train(graphed=False)), list(train(graphed=True))
    different = sum(not torch.equal(a, b) for a, b in zip(eager, graphed, strict=True))
    count = torch.tensor(different, device=DEVICE)
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        print(f"{int(count)} differ" if count else "bitwise equal", flush=True)
    dist.destroy_process_group()
    raise SystemExit(int(count > 0))


if __name__ == "__main__":
    main()
