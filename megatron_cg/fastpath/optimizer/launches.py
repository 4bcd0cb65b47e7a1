"""Kernels launched for many tensors at once, without Transformer Engine's applier around them.

Note [What TE's applier does]
    ``multi_tensor_applier`` (transformer-engine 2.20.2) takes the local tensor of each DTensor,
    leaves out what is of no elements where the first list's tensor is, adds the size of a chunk,
    and calls the kernel, or does not where nothing is left. It is at that tensor by tensor, in
    Python. That it does nothing else is found by comparing what a kernel gets, once and again where
    somebody has put another applier in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn

from megatron_cg.upstream.patch import put_over

_APPLIER = "multi_tensor_applier"
_PLAIN = {torch.Tensor, nn.Parameter}


@dataclass(frozen=True)
class Launch:
    """One call of a kernel for many tensors, with all that it is given but the flag."""

    kernel: Any
    chunk_size: int | None
    tensors: Sequence[list[torch.Tensor]]
    numbers: tuple[Any, ...]

    def __call__(self, flag: torch.Tensor) -> Any:
        """Launch it; ``flag`` is where it says that a number is not finite."""
        return self.kernel(self.chunk_size, flag, self.tensors, *self.numbers)

    def facts(self) -> tuple[Any, ...]:
        """All of it in a form that can be compared: places for tensors, nothing for a number's."""
        places = [[(t.data_ptr(), t.numel(), t.dtype) for t in row] for row in self.tensors]
        numbers = [None if isinstance(n, torch.Tensor) else n for n in self.numbers]
        return self.kernel, self.chunk_size, places, numbers


def launched_by(call: Callable[[], Any], module: str) -> tuple[Any, list[Launch]]:
    """What ``call`` returns, and what it hands to kernels by the applier of that ``module``."""
    found: list[Launch] = []
    owner = sys.modules[module]
    undo = put_over(owner, _APPLIER, _noting(getattr(owner, _APPLIER), found))
    try:
        return call(), found
    finally:
        undo()


def _noting(applier: Any, launches: list[Launch]) -> Callable[..., Any]:
    """TE's ``applier``, which adds to ``launches`` whatever it hands to a kernel."""

    def applied(kernel: Any, flag: Any, tensors: Any, *numbers: Any) -> Any:
        def noted(chunk_size: int, flag: Any, tensors: Any, *numbers: Any) -> Any:
            launch = Launch(kernel, chunk_size, tensors, numbers)
            launches.append(launch)
            return launch(flag)

        return applier(noted, flag, tensors, *numbers)

    return applied


def without_empty(lists: Sequence[list[torch.Tensor]]) -> Sequence[list[torch.Tensor]]:
    """See Note [What TE's applier does]."""
    sizes = list(map(torch.Tensor.numel, lists[0]))
    return lists if all(sizes) else [list(compress(tensors, sizes)) for tensors in lists]


def are_plain(tensors: Sequence[Any]) -> bool:
    """Whether all are tensors of torch's own class, and of float32."""
    return set(map(type, tensors)) <= _PLAIN and {t.dtype for t in tensors} <= {torch.float32}
