"""Compile a tensor-parallel Megatron layer in one process, and train with it on every rank.

    python examples/precompiled_layer.py --save compiled
    torchrun --nproc-per-node 2 examples/precompiled_layer.py --load compiled

Without a GPU, start the second with ``python``, too: two processes then train over gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEQUENCE, BATCH, HIDDEN, LAYERS, STEPS = 16, 2, 64, 2, 3


def build(device: str = "meta") -> Any:
    """A layer of Megatron's local spec at TP 2, its arguments, groups and configuration."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_cg.compiled.region import Region, megatron_groups

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    if device != "meta":
        model_parallel_cuda_manual_seed(1)
    with torch.device(device):
        layer = build_module(get_gpt_layer_local_spec(), config=config).to(device)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return Region(layer, (hidden,), {"attention_mask": mask}, megatron_groups(), config)


def save_layer(folder: Path) -> None:
    """Compile for GPUs like this machine's, or for its CPU. No process group may exist yet."""
    from megatron_cg.compiled.save import save

    on_gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(not on_gpu)  # As the processes on a CPU train.
    capability = torch.cuda.get_device_capability() if on_gpu else None
    made = save(build, folder, name="build", world_size=2, capability=capability)
    print(f"wrote {folder}/build.artifact, traced as ranks {made.traced_ranks} of 2")


def train(folder: Path, device: str) -> None:
    """Load the artifact on all ranks, attach it to two layers, and take some steps."""
    from megatron_cg.compiled.load import load
    from megatron_cg.consensus.exchange import Agreement
    from megatron_cg.errors import ArtifactRefusedError

    torch.manual_seed(1)
    regions = [build(device) for _ in range(LAYERS)]
    layers = torch.nn.ModuleList(region.module for region in regions)
    how = "compiled"
    try:
        load(folder, "build", regions[0], Agreement()).attach(layers)
    except ArtifactRefusedError as error:  # On all ranks, if any refused.
        how = "eager"
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-2)
    for step in range(STEPS):
        hidden = regions[0].args[0]
        for layer in layers:
            hidden, _context = layer(hidden, **regions[0].kwargs)
        loss = hidden.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{how}, step {step} loss {float(loss.detach()):.6f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Save, or train in the processes of torchrun on GPUs, or in two of our own without."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--save", type=Path, metavar="DIR")
    action.add_argument("--load", type=Path, metavar="DIR")
    args = parser.parse_args(arguments)
    if args.save is not None:
        save_layer(args.save)
        return
    if not torch.cuda.is_available():
        from megatron_cg.tape.launch import run_processes

        run_processes(partial(train, args.load, "cpu"))
        return
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    try:
        train(args.load, f"cuda:{rank}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
