"""Fakes of gradient bucketing and of Megatron-FSDP's hooks, for detached weights without either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Bucketing:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        """Gradients, and which of their weights are used in another way too."""
        self.borrowed: list[bool] = []
        self.detached: list[Any] = []
        self.to_come: Callable[[], bool] = bool

    def knows(self, parameter: object) -> bool:
        return isinstance(parameter, nn.Parameter)

    def detach(self, weights: list[Any], to_come: Callable[[], bool]) -> list[Any]:
        self.to_come = to_come
        self.detached += weights
        return weights

    def attach(self, weights: list[Any]) -> None:
        gone = set(weights)
        self.detached = [weight for weight in self.detached if weight not in gone]

    def take_detached(
        self,
        weights: list[Any],
        gradients: list[torch.Tensor],
        used: list[bool],
        *,
        borrowed: bool = False,
    ) -> None:
        self.taken.append((gradients, used))
        self.borrowed.append(borrowed)


def hook_weights(weights: Iterable[nn.Parameter]) -> None:
    """Give each weight a hook, instead of Megatron-FSDP's own."""
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: None)
