"""A bucket of gradients while a backward pass fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron_cg.fastpath.gradients.views import BucketViews


@dataclass
class Bucket:
    """A bucket of a unit, and what of it waits to be handed over."""

    number: int
    gradients: Any
    """Megatron-FSDP's buffer of them."""
    views: BucketViews
    size: int
    """How many parameters need a gradient."""
    waiting: list[nn.Parameter] = field(default_factory=list)
    waiting_bytes: int = 0
    handed_over: int = 0
    """In this backward pass, ``waiting`` not among them."""
    backward: object = None
    """Megatron-FSDP's own set for the backward pass that ``waiting`` belongs to."""
    stream: int = 0
    """On which what waits was computed."""
    copied_on: int | None = None
    """The stream of the last copy into it in this backward pass; all others come before it."""

    def complete_with(self, more: int) -> bool:
        """Whether all gradients have come, ``more`` among them that are not counted yet."""
        return self.handed_over + len(self.waiting) + more == self.size

    def waits_on_another(self, stream: int) -> bool:
        """Whether what waits was computed on another stream; see Note [One stream a copy]."""
        return bool(self.waiting) and self.stream != stream

    def begin(self, backward: object) -> None:
        """A new backward pass begins."""
        self.backward, self.handed_over, self.copied_on = backward, 0, None
        self.waiting, self.waiting_bytes = [], 0


class Together:
    """Weights whose gradients come at once; what is asked of all of them in each pass.

    Each question is asked for every expert of every layer, so they are short ones.

    Args:
        weights: of one operation.
        bucket: of all of them, or None where there are several.
    """

    def __init__(self, weights: list[nn.Parameter], bucket: Bucket | None) -> None:
        self.weights, self.bucket = weights, bucket
        self.all = frozenset(weights)
        self.others = frozenset(weights[:-1])
        """All but the last one."""
        self._shapes = [weight.shape for weight in weights]
        self._dtype = weights[0].dtype

    def are_plain(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether there is nothing to do but to copy them."""
        if any(gradient is None for gradient in gradients):
            return False
        there: Sequence[Any] = gradients
        weights: Sequence[Any] = self.weights
        return (
            [gradient.shape for gradient in there] == self._shapes
            and all(gradient.dtype is self._dtype for gradient in there)
            and all(weight.grad is None for weight in weights)
            and not any(weight.grad_added_to_main_grad for weight in weights)
        )
