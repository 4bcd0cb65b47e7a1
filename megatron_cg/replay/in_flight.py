"""Replays that wait for their backward: other graphs may reuse the memory of their activations.

Note [Order of replays]
    The graphs of a session share one memory pool. Forward passes were captured in the order of the
    units, then backward passes in reverse. Once a unit's backward has been captured, the pool
    reuses the memory of its activations. So while unit ``n`` waits for its backward, any pass of a
    later unit is safe to replay, since that memory was in use when the pass was captured. A pass of
    ``n`` itself or of an earlier unit may overwrite it. Megatron's schedules keep this order. A
    custom training loop may break it: the same unit twice in a pass, two forward passes before the
    first backward, units in another order, ``retain_graph=True``.

Relied on: torch 2.11, the node of a ``torch.autograd.Function`` is its own Python object and lives
exactly as long as the node is in the autograd graph; ``Node.register_prehook``.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.guard import Mismatch


class _Pass:
    """One forward replay, until its backward begins or can no longer be run."""

    def __init__(self, index: int, name: str, node: Any) -> None:
        self.index, self.name = index, name
        self.node = weakref.ref(node)


class InFlight:
    """The replays of one session that wait for their backward, in the order of replay."""

    def __init__(self) -> None:
        self._waiting: list[_Pass] = []

    def broken(self, index: int) -> Mismatch | None:
        """What forbids a forward replay of the unit ``index`` now, or None."""
        self._drop_dead()
        for other in self._waiting:
            if other.index >= index:
                return Mismatch(
                    "order",
                    "the backward of earlier passes",
                    "over",
                    f"still to come for {other.name}",
                    "A replay would overwrite what that backward reads. Call each unit once in a "
                    "pass, in the order of the steps before capture, and run the backward (or let "
                    "the loss go) before the next pass.",
                )
        return None

    def begin(self, index: int, name: str, outputs: Any) -> None:
        """Record a forward replay that returned ``outputs``.

        Its backward raises ReplayMismatchError if it runs out of order or a second time.
        """
        tensors = [item for item in tree_flatten(outputs)[0] if isinstance(item, torch.Tensor)]
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is not None:
            this = _Pass(index, name, node)
            self._waiting.append(this)
            node.register_prehook(lambda _gradients: self._end(this))

    def _end(self, this: _Pass) -> None:
        self._drop_dead()
        if this not in self._waiting:
            raise ReplayMismatchError(
                f"{this.name}: its backward runs a second time, and a replayed graph has given its "
                "activations up by then. Call backward() without retain_graph, or leave the unit "
                "out of graph_units."
            )
        if self._waiting[-1] is not this:
            raise ReplayMismatchError(
                f"{this.name}: its backward comes before that of {self._waiting[-1].name}, which "
                "was replayed after it, and may overwrite what that one reads. Run one backward() "
                "over the whole pass, or leave one of the two out of graph_units."
            )
        self._waiting.pop()

    def _drop_dead(self) -> None:
        self._waiting = [item for item in self._waiting if item.node() is not None]
