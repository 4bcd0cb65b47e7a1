"""Hooks on tensors that a unit registers in its forward pass.

Their operations on gradients are in the graph like all others. But a replay runs no Python, so what
else they do would be lost: such a hook is refused, as state that a pass changes is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_cg.capture.python_state import Change, PythonState
from megatron_cg.upstream.patch import put_over, undone_after


@contextmanager
def tensor_hooks_observed(found: Callable[[Change], None]) -> Iterator[None]:
    """Observe the hooks that are registered in the block, whenever they are called.

    ``found`` gets each change of Python state that one of them makes. It is undone.
    """
    original = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        state = PythonState({})
        state.add(hook)

        def called(gradient: torch.Tensor) -> Any:
            state.begin()
            try:
                return hook(gradient)
            finally:
                state.end()
                for change in state.changes():
                    found(change)
                state.restorer()()

        return original(tensor, called)  # type: ignore[no-untyped-call]

    with undone_after(put_over(torch.Tensor, "register_hook", register_hook)):
        yield
