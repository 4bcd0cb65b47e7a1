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
    """A bucket of a unit, and its gradients that wait to be copied."""

    number: int
    gradients: Any
    """Megatron-FSDP's buffer of gradients."""
    views: BucketViews
    size: int
    """Number of parameters that need a gradient."""
    waiting: list[nn.Parameter] = field(default_factory=list)
    waiting_bytes: int = 0
    handed_over: int = 0
    """Number of gradients taken in this backward pass, without ``waiting``."""
    backward: object = None
    """Megatron-FSDP's set of parameters in the backward pass that ``waiting`` belongs to."""
    stream: int = 0
    """The stream on which the waiting gradients were computed."""
    copied_on: int | None = None
    """The stream of the last copy in this backward pass; all other copies come before it."""

    def complete_with(self, more: int) -> bool:
        """Whether the bucket is complete with ``more`` gradients that are not counted yet."""
        return self.handed_over + len(self.waiting) + more == self.size

    def waits_on_another(self, stream: int) -> bool:
        """Whether gradients that wait are from another stream; see Note [One stream a copy]."""
        return bool(self.waiting) and self.stream != stream

    def begin(self, backward: object) -> None:
        """A new backward pass begins."""
        self.backward, self.handed_over, self.copied_on = backward, 0, None
        self.waiting, self.waiting_bytes = [], 0


class Together:
    """Weights with gradients that arrive at once, and the checks that run on all in each pass.

    Each check runs for every expert of every layer, so it must be cheap.

    Args:
        weights: the weights of one operation.
        buckets: the bucket of each weight.
    """

    def __init__(self, weights: list[nn.Parameter], buckets: Sequence[Bucket]) -> None:
        self.weights = weights
        places: dict[int, list[int]] = {}
        for place, bucket in enumerate(buckets):
            places.setdefault(bucket.number, []).append(place)
        # An eager pass reaches the last weights first, so a bucket is complete with its first one.
        ordered = sorted(places.values(), reverse=True)
        self.parts = [OfBucket(buckets[at[0]], [weights[i] for i in at], at) for at in ordered]
        """By bucket, in the order in which an eager pass completes the buckets."""
        self.all = frozenset(weights)

    def plain(self, gradients: Sequence[torch.Tensor | None]) -> list[list[Any]] | None:
        """The gradients of each part if they only need to be copied, else None."""
        found = [[gradients[place] for place in part.places] for part in self.parts]
        if all(part.are_plain(own) for part, own in zip(self.parts, found, strict=True)):
            return found
        return None


class OfBucket:
    """Weights of one operation that share a bucket.

    Args:
        bucket: the bucket.
        weights: the weights.
        places: their places among all weights of the operation.
    """

    def __init__(self, bucket: Bucket, weights: list[nn.Parameter], places: list[int]) -> None:
        self.bucket, self.weights, self.places = bucket, weights, places
        self.others = frozenset(weights[:-1])
        """All weights but the last one."""
        self._shapes = [weight.shape for weight in weights]
        self._dtype = weights[0].dtype

    def are_plain(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the gradients only need to be copied."""
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
