"""Layers compiled once without a GPU, loaded on two ranks, captured and replayed, bit for bit.

    megatron-cg precompile tests/functional/compiled_layers.py:llama --world-size 2 \
        --out DIR --deterministic
    torchrun --nproc-per-node 2 -m tests.functional.compiled_layers DIR

The model trains eagerly, with graphs, and with graphs of the loaded code.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_cg import graph_units
from megatron_cg.compiled.load import load
from megatron_cg.compiled.region import Region, megatron_groups
from megatron_cg.consensus.exchange import Agreement
from tests.unit.compiled.regions import Layers, causal_mask, config, hidden_states, local_layer

LAYERS, STEPS, MICROBATCHES, WARMUP = 3, 12, 2, 3
SEQUENCE, BATCH, HIDDEN = 64, 2, 256


def llama(device: str = "meta") -> Region:
    """A layer of Llama's form at TP 2, of Megatron's local spec."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    settings = config(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=2,
    )
    layer = local_layer(settings, device, use_cudagraphable_rng=True, force_reset_rng=True)
    # On all ranks the same, as load compares with them.
    hidden = hidden_states(settings, device, rows=SEQUENCE)
    with torch.device(device):
        rotary = RotaryEmbedding(settings.kv_channels, 1.0, use_cpu_initialization=True)
        angles = rotary(SEQUENCE) if device != "meta" else torch.zeros(SEQUENCE, 1, 1, 32)
    kwargs = {"attention_mask": causal_mask(SEQUENCE, device), "rotary_pos_emb": angles.to(device)}
    return Region(layer, (hidden,), kwargs, megatron_groups(), settings)


def train(folder: Path, how: str, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All losses and gradient norms, then this rank's parameters, each with what it is.

    ``how`` is eager, graphs, or compiled, which is with graphs too.
    """
    regions = []
    for number in range(LAYERS):
        regions.append(llama(device))
        torch.manual_seed(number)
        for parameter in regions[-1].module.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    model = Layers(regions)
    if how == "compiled":
        compiled = load(folder, "llama", regions[0], Agreement())
        compiled.attach(model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    graphs: Any = nullcontext()
    if how != "eager":
        graphs = graph_units(model, ["layers.*"], warmup_steps=WARMUP, backend="native")
    with graphs:
        for step in range(STEPS):
            with graphs.step() if how != "eager" else nullcontext():
                for microbatch in range(MICROBATCHES):
                    torch.manual_seed(step * MICROBATCHES + microbatch)
                    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, device=device)
                    loss = model(hidden.requires_grad_()).square().mean()
                    loss.backward()
                    yield f"step {step}, loss {microbatch}", loss.detach().clone()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                yield f"step {step}, gradient norm", norm
                optimizer.step()
                optimizer.zero_grad()
        if how != "eager" and dist.get_rank() == 0:
            print(f"{how}: {graphs.counters.as_dict()}", flush=True)
    for label, parameter in model.named_parameters():
        yield label, parameter.detach().clone()


def compare(folder: Path, device: str) -> None:
    """Train in each way; exit with 1 if one differs on a rank from eager training."""
    torch.use_deterministic_algorithms(True)
    eager = list(train(folder, "eager", device))
    different = []
    for how in ("graphs", "compiled"):
        pairs = zip(eager, train(folder, how, device), strict=True)
        labels = [label for (label, one), (_, two) in pairs if not torch.equal(one, two)]
        different.append(len(labels))
        if labels:
            print(f"{how}, rank {dist.get_rank()}: {labels[0]} is the first to differ", flush=True)
    count = torch.tensor(different, device=device)
    dist.all_reduce(count)
    if dist.get_rank() == 0:
        verdict = f"{count.tolist()} differ" if count.any() else "bitwise equal"
        print(f"{len(eager)} values, {verdict}", flush=True)
    if count.any():
        raise SystemExit(1)


def main() -> None:
    """Compare one model in the processes of torchrun."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    try:
        compare(args.folder, f"cuda:{rank}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
