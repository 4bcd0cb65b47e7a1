"""The standalone example with other blocks.

Blocks recompute themselves, or torch compiles in them.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.functional.other_blocks reentrant \
        --compare --dropout 0
"""

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
        run = partial(super().forward, causal=causal)
        again: Any = partial(checkpoint, use_reentrant=self.reentrant, preserve_rng_state=True)
        recomputed: torch.Tensor = again(run, x)
        return recomputed


class Reentrant(Recomputed):
    reentrant = True


@torch.compile(dynamic=False)
def activation(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x) * torch.tanh(x)


class Compiled(example.Block):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__(hidden, dropout)
        self.mlp[1] = Activation()


class Activation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = activation(x)
        return activated


BLOCKS = {"recomputed": Recomputed, "reentrant": Reentrant, "compiled": Compiled}

if __name__ == "__main__":
    example.Block = BLOCKS[sys.argv[1]]  # type: ignore[misc]
    example.main(sys.argv[2:])
