"""Multi-tensor kernels, launched without Transformer Engine's applier.

Note [What TE's applier does]
    ``multi_tensor_applier`` (transformer-engine 2.20.2) takes the local tensor of each DTensor,
    drops the entries where the first list's tensor has no elements, adds the chunk size, and calls
    the kernel if any entry is left. It does this tensor by tensor, in Python. To verify that it
    does nothing else, the kernel's arguments are compared: once, and again if other code has
    installed another applier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import nn

from megatron_cg.upstream.patch import put_over, undone_after

_APPLIER = "multi_tensor_applier"
_PLAIN = {torch.Tensor, nn.Parameter}


@dataclass(frozen=True)
class Launch:
    """One call of a multi-tensor kernel, with all its arguments except the flag."""

    kernel: Any
    chunk_size: int | None
    tensors: Sequence[list[torch.Tensor]]
    numbers: tuple[Any, ...]

    def __call__(self, flag: torch.Tensor) -> Any:
        """Launch it; the kernel sets ``flag`` if a number is not finite."""
        return self.kernel(self.chunk_size, flag, self.tensors, *self.numbers)

    def facts(self) -> tuple[Any, ...]:
        """The call in a comparable form: addresses of tensors, None for a number in a tensor."""
        places = [[(t.data_ptr(), t.numel(), t.dtype) for t in row] for row in self.tensors]
        numbers = [None if isinstance(n, torch.Tensor) else n for n in self.numbers]
        return self.kernel, self.chunk_size, places, numbers


def launched_by(call: Callable[[], Any], module: str) -> tuple[Any, list[Launch]]:
    """The result of ``call``, and what it launches through the applier of ``module``."""
    found: list[Launch] = []
    owner = sys.modules[module]
    noting = put_over(owner, _APPLIER, _noting(getattr(owner, _APPLIER), found))
    with undone_after(noting):
        return call(), found


def _noting(applier: Any, launches: list[Launch]) -> Callable[..., Any]:
    """TE's ``applier``, which also adds each launch to ``launches``."""

    def applied(kernel: Any, flag: Any, tensors: Any, *numbers: Any) -> Any:
        def noted(chunk_size: int, flag: Any, tensors: Any, *numbers: Any) -> Any:
            launch = Launch(kernel, chunk_size, tensors, numbers)
            launches.append(launch)
            return launch(flag)

        return applier(noted, flag, tensors, *numbers)

    return applied


def without_empty(lists: Sequence[list[torch.Tensor]]) -> Sequence[list[torch.Tensor]]:
    """Drop empty entries; see Note [What TE's applier does]."""
    sizes = list(map(torch.Tensor.numel, lists[0]))
    return lists if all(sizes) else [list(compress(tensors, sizes)) for tensors in lists]


def are_plain(tensors: Sequence[Any]) -> bool:
    """Whether all are float32 and of torch's own tensor classes."""
    return set(map(type, tensors)) <= _PLAIN and {t.dtype for t in tensors} <= {torch.float32}
