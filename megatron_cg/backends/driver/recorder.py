"""What records a pass: the protocol between the driver and a tape or CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

Tensors = tuple[torch.Tensor | None, ...]


class Recording(Protocol):
    """One recorded forward or backward pass."""

    def replay(self) -> None:
        """Run the pass again, on the memory on which it was recorded."""

    def finished(self, lent: Tensors) -> None:
        """The caller has taken the results of a replay.

        ``lent`` are results that it reads in place until the next replay of any pass.
        """

    def reset(self) -> None:
        """Release the recording. Safe to call twice."""


@dataclass
class Recorded:
    """All that capture records for one sample of one callable.

    ``inputs`` is the static input surface: the flattened sample arguments, the keyword samples
    in the order of ``kwarg_names``, then the module's parameters that receive a gradient.
    ``outputs``, ``grad_outputs`` and ``grad_inputs`` are flat and are in static memory.
    """

    module: nn.Module
    label: str
    user_args: int
    kwarg_names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    parameters: tuple[nn.Parameter, ...]
    forward: Recording | None = None
    backward: Recording | None = None
    outputs: Tensors = ()
    output_spec: TreeSpec = field(default_factory=lambda: tree_flatten(None)[1])
    grad_outputs: Tensors = ()
    grad_inputs: Tensors = ()
    reached: dict[int, set[int]] = field(default_factory=dict)
    """For each output that needs a gradient, if there are several: the ids of ``inputs`` that it
    gives one to."""
    gradients_borrowed: bool = False
    """Whether gradients of parameters are returned in static memory, without a copy."""


class Recorder(Protocol):
    """Records the passes of one capture, one at a time, in one pool of memory."""

    def warming_up(self) -> AbstractContextManager[None]:
        """A block in which all passes and capture-time hooks of the warmup run."""

    def recording(self, module: nn.Module, label: str) -> AbstractContextManager[Recording]:
        """A block whose work is recorded; ``label`` names the pass of ``module`` in messages."""

    def release(self, results: Tensors) -> Tensors:
        """Let passes that are recorded from now on use the memory of ``results``.

        Returns tensors for replays, on the same memory.
        """

    def settle(self, samples: Sequence[Recorded]) -> None:
        """Every pass is recorded; ``samples`` are in the order of their backward passes."""

    def abandon(self) -> None:
        """The capture failed: release all recordings and the pool. Raises nothing of its own."""
