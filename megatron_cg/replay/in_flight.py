"""The order of passes: which replays wait for their backward, and whose outputs are in use.

Note [Order of replays]
    The graphs of a session share one memory pool. Forward passes were captured in the order of the
    units, then backward passes in reverse. Once a unit's backward has been captured, the pool
    reuses the memory of its activations. So while unit ``n`` waits for its backward, any pass of a
    later unit is safe to replay, since that memory was in use when the pass was captured. A pass of
    ``n`` itself or of an earlier unit may overwrite it. Megatron's schedules keep this order. A
    custom training loop may break it: the same unit twice in a pass, two forward passes before the
    first backward, units in another order, ``retain_graph=True``.
    A backward pass out of order is always an error. A forward pass out of order can still run
    eagerly: standalone units ask :meth:`InFlight.broken` before each replay.

Note [Outputs that outlive their pass]
    A pass whose backward can no longer run may still have outputs in use, such as a target that was
    detached. They lie in the memory of a graph as well, so that unit still waits until they are let
    go. torch counts who uses a storage; nothing else tells, since a detached tensor is another
    object on the same memory. After the backward pass the next replay of the same unit overwrites
    outputs that are still in use, such as activations that a loop keeps for a log. So its passes
    run eagerly until those outputs are dropped. From then on the unit gives its caller copies.
    The same holds for gradients of its inputs, which hooks and ``torch.autograd.grad`` give out.

Relied on: torch 2.11, the node of a ``torch.autograd.Function`` is its own Python object and lives
exactly as long as the node is in the autograd graph; ``Node.register_prehook``; the count of a
storage's users includes the Python object that is asked.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten

from megatron_cg.consensus.process_exit import arm_fast_exit
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.borders import local
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.unit import Unit
from megatron_cg.upstream.symbols import Symbol

_USERS = Symbol("torch._C:_storage_Use_Count", "how many tensors use a storage")
RELIES_ON = (_USERS,)


class _Pending:
    """One forward replay, until its backward begins, or can no longer run and no output is used.

    ``outputs`` are what it returned, if anybody asks for it; nobody else has them yet.
    """

    def __init__(self, unit: Unit, node: Any, outputs: Sequence[torch.Tensor]) -> None:
        self.unit, self.node = unit, weakref.ref(node)
        self._storages: dict[Any, int] = {}
        """With how many users each has when nobody uses what the replay has returned."""
        self.returned(outputs)

    def returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """It has returned these tensors, or gradients of its inputs; nobody else has them yet."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        own = [storage._cdata for storage in storages]
        for one in storages:
            self._storages[one] = _USERS.cached(one._cdata) - own.count(one._cdata)

    @property
    def is_over(self) -> bool:
        return self.node() is None and not self.is_used

    @property
    def is_used(self) -> bool:
        return any(_USERS.cached(s._cdata) > unused for s, unused in self._storages.items())


class InFlight:
    """The forward replays of one session that wait for their backward."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Pending] = {}
        """The last replay of each unit, by the unit's index, in the order of replay."""
        self._over: dict[int, _Pending] = {}
        """The last replay of each unit whose backward has begun."""
        self._is_asked = False
        """Whether :meth:`broken` is asked before replays; if not, outputs need not be known."""

    def broken(self, index: int) -> Mismatch | None:
        """What forbids a forward replay of the unit ``index`` now, or None."""
        self._is_asked = True
        for other, replay in self._waiting.items():
            if other >= index and not replay.is_over:
                return _waits(replay)
        return None

    def is_kept(self, index: int) -> bool:
        """Whether outputs or gradients of the unit's last replay are in use after its backward."""
        replay = self._over.get(index)
        return replay is not None and replay.is_used

    def has(self, node: Any) -> bool:
        """Whether a node of autograd is a replay that waits for its backward."""
        return any(replay.node() is node for replay in reversed(self._waiting.values()))

    def nodes(self) -> dict[str, Any]:
        """The nodes of autograd of all replays that wait for their backward, by unit."""
        waiting = ((replay.unit.name, replay.node()) for replay in self._waiting.values())
        return {name: node for name, node in waiting if node is not None}

    def begin(
        self,
        index: int,
        unit: Unit,
        outputs: Any,
        before_backward: Callable[[Any], None],
        inputs: int = 0,
    ) -> bool:
        """Record a forward replay with this many ``inputs`` that returned ``outputs``.

        Returns whether a backward can follow: an output needs a gradient. ``before_backward`` gets
        the outputs' gradients when it begins. It raises ReplayMismatchError if it runs out of order
        or a second time.
        """
        self._waiting.pop(index, None)
        tensors = [t for t in tree_flatten(outputs)[0] if isinstance(t, torch.Tensor)]
        node = next((t.grad_fn for t in tensors if t.grad_fn is not None), None)
        if node is None:
            return False
        replay = self._waiting[index] = _Pending(unit, node, tensors if self._is_asked else ())
        node.register_prehook(partial(self._end, index, replay, before_backward))
        if self._is_asked:
            node.register_hook(partial(_note_gradients, replay, inputs))
        return True

    def _end(
        self,
        index: int,
        this: _Pending,
        before_backward: Callable[[Any], None],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        if self._waiting.get(index) is not this:
            _refuse(
                this.unit,
                "runs after another forward replay of the same graph, or a second time; the "
                "graph's memory no longer holds what it reads. Run each backward once and before "
                "the layer's next forward pass, without retain_graph, and with no recompute around "
                "a captured region.",
            )
        waiting = reversed(self._waiting.values())
        last = next(item for item in waiting if item is this or item.node() is not None)
        if last is not this:
            _refuse(
                this.unit,
                f"comes before that of {last.unit.name}, which was replayed after it, and may "
                "overwrite what that one reads. Run one backward() over the whole pass.",
            )
        if torch.is_grad_enabled():
            # Gradients of a replay have no graph of autograd of their own. What depends on them
            # would miss a part, and autograd would not say so.
            _refuse(
                this.unit,
                "runs with create_graph=True, and a CUDA graph has no second derivative. Leave "
                "create_graph out if nothing differentiates the gradients.",
            )
        self._over[index] = self._waiting.pop(index)
        before_backward(gradients)


def _note_gradients(replay: _Pending, inputs: int, gradients: Sequence[Any], _given: Any) -> None:
    """Gradients of weights are copies; those of the inputs before them lie in the graph."""
    replay.returned([local(one) for one in gradients[:inputs] if one is not None])


def _refuse(unit: Unit, what_backward_does: str) -> NoReturn:
    arm_fast_exit()
    raise ReplayMismatchError(
        f"{unit.name}: its backward {what_backward_does} Or: {unit.leave_out(None)}"
    )


def _waits(replay: _Pending) -> Mismatch:
    if replay.node() is None:
        return Mismatch(
            "order",
            "the outputs of earlier passes",
            "released",
            f"still in use for {replay.unit.name}",
            "A replay would overwrite them. Drop them before the next pass, or copy what you keep "
            "(.detach().clone()).",
        )
    return Mismatch(
        "order",
        "the backward of earlier passes",
        "over",
        f"still to come for {replay.unit.name}",
        "A replay would overwrite what that backward reads. Call each unit once in a pass, in the "
        "order of the steps before capture, and run the backward (or drop the loss) before the "
        "next pass.",
    )
