"""Conjugates and negatives that torch computes later: their memory is that of the original."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_cg.backends.tape.tape_backend import TapeBackend


class Rotary(nn.Module):
    """Complex rotary embedding; the backward pass multiplies by the conjugate of ``factors``."""

    factors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(1, (4, 2))) * self.factors
        return torch.view_as_real(turned).flatten(1)


class Imaginary(nn.Module):
    """The imaginary part of a conjugate, which is a negative view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(x.unflatten(1, (4, 2))).conj().imag * 3.0


@pytest.mark.parametrize("make", [Rotary, Imaginary])
def test_a_replay_computes_with_what_the_view_stands_for(make: Callable[[], nn.Module]) -> None:
    module = make()
    sample = torch.ones(3, 8, requires_grad=True)
    (graph,) = TapeBackend().capture((module,), [(sample,)], capture_time_hooks=[{}])
    found = []
    for call in (module, graph):
        x = torch.arange(24.0).reshape(3, 8).requires_grad_()
        out = call(x)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        found.append((out.detach().clone(), x.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
