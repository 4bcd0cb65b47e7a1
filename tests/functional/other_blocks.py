"""The standalone example with other blocks, or with a model of torchtitan's.

Blocks recompute themselves, or torch compiles in them.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.functional.other_blocks reentrant \
        --compare --dropout 0
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_cg.examples import standalone_transformer as example


class Recomputed(example.Block):
    """A block whose backward pass computes it again, and sets random states for that."""

    reentrant = False

    def forward(self, x: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
        """See :class:`example.Block`."""
        run = partial(super().forward, causal=causal)
        again: Any = partial(checkpoint, use_reentrant=self.reentrant, preserve_rng_state=True)
        recomputed: torch.Tensor = again(run, x)
        return recomputed


class Reentrant(Recomputed):
    """The same, by torch's older kind of checkpoint."""

    reentrant = True


@torch.compile(dynamic=False)
def activation(x: torch.Tensor) -> torch.Tensor:
    """A kernel of Inductor's, forward and backward."""
    return functional.silu(x) * torch.tanh(x)


class Compiled(example.Block):
    """A block with a compiled function in its MLP."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__(hidden, dropout)
        self.mlp[1] = Activation()


class Activation(nn.Module):
    """Calls the compiled function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        activated: torch.Tensor = activation(x)
        return activated


def titan(args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """Llama 3 of torchtitan 0.2.2 in BF16 under its own FSDP2, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    torch.manual_seed(args.seed)
    shape = TransformerModelArgs(dim=1024, n_layers=3, n_heads=8, vocab_size=256, max_seq_len=512)
    model = Transformer(shape).to(device)
    with torch.no_grad():
        model.init_weights()
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


BLOCKS = {"recomputed": Recomputed, "reentrant": Reentrant, "compiled": Compiled}

if __name__ == "__main__":
    if sys.argv[1] in BLOCKS:
        example.Block = BLOCKS[sys.argv[1]]  # type: ignore[misc]
    else:
        example.build = titan
    example.main(sys.argv[2:])
