"""Modules to capture, and what eager calls and replays of them have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.base import Backend, CaptureRequest


class Block(nn.Module):
    """Views, an in-place op, dropout, a buffer that counts, a constant and a mask by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.seen: torch.Tensor = nn.Buffer(torch.zeros(8))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        out = nn.functional.dropout(self.down(hidden), 0.3).view(2, -1).reshape(x.shape)
        self.seen += out.detach().sum(0)
        out = out.masked_fill(mask, 0.0)
        out.mul_(torch.tensor(2.0))
        return out + x, x.detach().transpose(0, 1)


MASK = torch.tensor([True, False, False, False] * 8).reshape(4, 8)


def make_blocks() -> tuple[Block, ...]:
    torch.manual_seed(0)
    return Block(), Block(), Block()


def capture(
    backend: Backend,
    modules: tuple[nn.Module, ...],
    kwargs: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> Any:
    with backend.preserved(modules):
        samples: Any = [(torch.ones(4, 8, requires_grad=True),) for _ in modules]
        named = [kwargs or {} for _ in modules]
        return backend.capture(CaptureRequest(modules, samples, named, **options))


def small(backend: Backend, *modules: nn.Module, **options: Any) -> Any:
    """Graphs of modules of one small input, with nothing restored."""
    samples: Any = [(torch.ones(2, 4, requires_grad=True),) for _ in modules]
    return backend.capture(CaptureRequest(modules, samples, **options))


def train(modules: tuple[Block, ...], calls: tuple[Callable[..., Any], ...]) -> list[torch.Tensor]:
    """Three passes of different inputs; everything a user can see of them."""
    torch.manual_seed(5)
    seen = []
    for module in modules:
        module.seen.zero_()
    for scale in (1.0, -2.0, 0.5):
        source = (torch.arange(32.0).reshape(4, 8).sin() * scale).requires_grad_()
        hidden = source
        for call in calls:
            hidden, side = call(hidden, mask=MASK)
            hidden = hidden + side.sum()
        hidden.square().sum().backward()
        parameters = [p for module in modules for p in module.parameters()]
        seen += [hidden.detach().clone(), *(p.grad.clone() for p in [source, *parameters])]  # type: ignore[union-attr]
        seen += [module.seen.clone() for module in modules]
        for module in modules:
            module.zero_grad()
    return [*seen, torch.rand(3)]


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, act: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.act = act
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        made = ctx.act(gradients[0])
        return gradients[0] if made is None else made, None


in_backward: Callable[..., torch.Tensor] = _InBackward.apply
"""``(tensor, act)``: a copy, whose gradient is what ``act`` makes of it; as it was, if None."""


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight
