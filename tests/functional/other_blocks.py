"""The standalone example with blocks in which torch compiles; it takes the example's flags."""

import torch
from torch import nn
from torch.nn import functional

from megatron_cg.examples import standalone_transformer as example


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


if __name__ == "__main__":
    example.Block = Compiled  # type: ignore[misc]
    example.main()
