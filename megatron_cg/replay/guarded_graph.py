"""One graph with its guard, an item of ``layer.cuda_graphs``, and the eager passes instead of it.

And the order of passes: which replays wait for their backward, and whose outputs are in use.

Note [Turns]
    For a mismatch, ranks vote in each pass. For evaluation and deleted graphs, ranks vote only when
    a unit turns from replays to eager passes, and back. If one rank turns alone, its vote fails. A
    vote on a turn has the long timeout: ranks may fetch data or write a checkpoint before it.

Note [When gradients are counted]
    Megatron-FSDP reduces a bucket once all its parameters have got a gradient. A replay is one
    node: it waits for the gradients of all its outputs, and then reaches all weights, some with no
    gradient. In an eager pass each weight is reached as soon as the outputs that it needs have
    their gradients, or never. So if one rank falls back to eager alone, its buckets become ready in
    another order than those of other ranks. Therefore a node ties the outputs of such a pass
    together. Autograd passes what is undefined on to the weights.

Note [Order of replays]
    The graphs of a session share one memory pool. Forward passes were captured in the order of the
    units, then backward passes in reverse. Once a unit's backward has been captured, the pool
    reuses the memory of its activations. So while unit ``n`` waits for its backward, any pass of a
    later unit is safe to replay. A pass of ``n`` itself or of an earlier unit may overwrite it.
    Megatron's schedules keep this order; a loop of one's own may break it. A backward pass out of
    order is always an error. A forward pass out of order runs eagerly: units of ``graph_units`` ask
    :meth:`InFlight.broken` before each replay.

Note [Outputs that outlive their pass]
    A pass whose backward can no longer run may still have outputs in use, such as a target that was
    detached. Its unit still waits until they are released. Only the number of users of a storage,
    which torch counts, shows that: a detached tensor is another object on the same memory. After
    the backward pass the next replay of the same unit overwrites outputs that are still in use. So
    its passes run eagerly until those are released, and from then on the unit returns copies. The
    same holds for gradients of its inputs, which hooks and ``torch.autograd.grad`` receive.

Relied on: torch 2.11, the node of a ``torch.autograd.Function`` is its own Python object and lives
exactly as long as the node is in the autograd graph; ``Node.register_prehook``; the count of a
storage's users includes the Python object that is asked.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron_cg.consensus import exchange as agreement
from megatron_cg.consensus.process_exit import arm_fast_exit
from megatron_cg.errors import ReplayMismatchError
from megatron_cg.replay.borders import copied, local, own_gradient
from megatron_cg.replay.guard import Guard, Mismatch
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.plain import is_plain
from megatron_cg.replay.unit import Unit
from megatron_cg.replay.verify import RestoreContext, verify
from megatron_cg.upstream.patch import replace_function, undone_after
from megatron_cg.upstream.symbols import Symbol

_USERS = Symbol("torch._C:_storage_Use_Count", "how many tensors use a storage")
RELIES_ON = (_USERS,)

Prepared = Callable[[], Any] | Mismatch | None
"""What a call does: the replay, which may still return a mismatch, or an eager pass because of one.
None: an eager pass that is a part of a verification."""


@dataclass(frozen=True)
class ReplayFunction:
    """The autograd function that replays one graph.

    Note [Borrowed gradients]
        A graph's backward replay leaves the weight gradients in memory that other graphs of the
        pool also use, so a backend returns copies of them. While gradients are borrowed, the
        function returns them without a copy. They are valid until the next replay of any graph. The
        receiver must finish using them before that, on the stream of the backward pass.
    """

    function: Any
    """A class that derives from ``torch.autograd.Function``."""
    first_weight: int
    """How many arguments come before the weights, which are the last ones."""
    replace: Callable[[Any], Callable[[], None]]
    """Replaces the function by another object with a method ``apply``; returns the undo."""
    borrow: Callable[[], Callable[[], None]]
    """Borrow gradients until the returned function is called."""
    needs: tuple[bool, ...]
    """Which outputs need a gradient."""


class _Pending:
    """One forward replay, until its backward begins, or can no longer run and no output is used.

    ``outputs`` are what it returned; nobody else has them yet.
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
    def is_used(self) -> bool:
        return any(_USERS.cached(s._cdata) > unused for s, unused in self._storages.items())


class InFlight:
    """The forward replays of one session that wait for their backward."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Pending] = {}
        """The last replay of each unit, by the unit's index, in the order of replay."""
        self._backward_begun: dict[int, _Pending] = {}
        """The last replay of each unit whose backward has begun."""
        self._notes_gradients = False
        """Whether :meth:`results_in_use` is asked; else gradients of inputs need not be known."""

    def broken(self, index: int) -> Mismatch | None:
        """What forbids a forward replay of the unit ``index`` now, or None."""
        for other, replay in self._waiting.items():
            if other >= index and (replay.node() is not None or replay.is_used):
                return _waits(replay)
        return None

    def results_in_use(self, index: int) -> bool:
        """Whether outputs or gradients of the unit's last replay are in use after its backward."""
        self._notes_gradients = True
        replay = self._backward_begun.get(index)
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
        replay = self._waiting[index] = _Pending(unit, node, tensors)
        node.register_prehook(partial(self._end, index, replay, before_backward))
        if self._notes_gradients:
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
                "overwrite what that one reads. Run one backward() over the whole pass, with the "
                f"outputs of all units. A hook returning a new tensor cuts {last.unit.name} off.",
            )
        if torch.is_grad_enabled():
            # Gradients of a replay have no graph of autograd of their own. What depends on them
            # would miss a part, and autograd would not say so.
            _refuse(
                this.unit,
                "runs with create_graph=True, and a CUDA graph has no second derivative. Leave "
                "create_graph out if nothing differentiates the gradients.",
            )
        self._backward_begun[index] = self._waiting.pop(index)
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


def replay_instead(
    layer: Any, prepare: Callable[[Sequence[Any], Mapping[str, Any]], Prepared]
) -> Callable[[], None]:
    """Replace the forward of ``layer``, whose ``cuda_graphs`` are set; returns the undo.

    ``prepare`` takes the arguments of a call in training.
    """
    eager = forward_of(layer)
    graph: GuardedGraph = layer.cuda_graphs[0]
    conditions = graph.mismatches.conditions

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.training or not torch.is_grad_enabled():
            graph.begin_eagerly("it is in evaluation mode, or gradients are off")
            return eager(*args, **kwargs)
        why: Any = "its graphs were deleted"
        if layer.cuda_graphs:
            prepared = prepare(args, kwargs)
            if prepared is None:
                return eager(*args, **kwargs)
            why = None if conditions.all_eager else prepared
            if callable(why):
                graph.turn("replays", "replayed", replays=True)
                try:
                    made = why()
                except Exception:
                    conditions.flush_prefetch()
                    raise
                if not isinstance(made, Mismatch):
                    return made
                why = made
        graph.begin_eagerly(why)
        return graph.run_eagerly(eager, *args, **kwargs)

    return replace_function(layer, "forward", forward)


def forward_of(layer: Any) -> Callable[..., Any]:
    """Its forward; that of its class is looked up in each call, since somebody may patch it."""
    if "forward" in vars(layer):
        return layer.forward  # type: ignore[no-any-return]
    return lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)


class _Tie(torch.autograd.Function):
    """Passes tensors and their gradients on, all at once."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients


def as_one_node(outputs: Any) -> Any:
    """``outputs``, whose gradients go on all at once; see Note [When gradients are counted]."""
    flat, spec = tree_flatten(outputs, is_plain)
    tensors = {id(t): t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad}
    if len(tensors) < 2:
        return outputs
    apply: Any = _Tie.apply
    tied = dict(zip(tensors, apply(*tensors.values()), strict=True))
    return tree_unflatten([tied.get(id(output), output) for output in flat], spec)


class GuardedGraph:
    """Replays its graph if the guard allows it; otherwise runs the captured region eagerly.

    The first replay is verified, whatever the policy, and later ones when their unit is due. A
    graph that a verification has refuted is not replayed again.

    ``index`` is the unit's, in the order of forward passes. For ``kept`` see
    :func:`megatron_cg.replay.verify.verify`. ``collectives`` says whether the unit's graphs contain
    collectives. ``one_node``: gradients of eager passes must come as from a replay.
    """

    def __init__(
        self,
        graph: Any,
        guard: Guard,
        unit: Unit,
        mismatches: MismatchPolicy,
        replay: ReplayFunction,
        *,
        index: int,
        in_flight: InFlight,
        kept: RestoreContext,
        prepare_backward: Callable[[], bool],
        collectives: bool,
        one_node: bool = False,
    ) -> None:
        self.graph, self._guard, self.mismatches = graph, guard, mismatches
        self._unit, self._index, self.in_flight, self._kept = unit, index, in_flight, kept
        self.name, self.collectives, self._one_node = unit.name, collectives, one_node
        self._verifications = mismatches.verifications
        self.replay_function, self._prepare_backward = replay, prepare_backward
        self._in_replay_mode, self._has_replayed, self._gives_copies = True, False, False
        self._constant = tuple(n for n, needed in enumerate(replay.needs) if not needed)
        """Which outputs need no gradient."""
        self._own: dict[int, torch.UntypedStorage | None] = {}
        """The addresses of the memory of weights and buffers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, or run the region eagerly.

        Raises ReplayMismatchError; see :class:`MismatchPolicy`.
        """
        mismatch = self.forbids(args, kwargs)
        if mismatch is None:
            return self.replay(args, kwargs)
        self.begin_eagerly(mismatch)
        return self.run_eagerly(self._unit.run, args, kwargs)

    def begin_eagerly(self, why: Mismatch | str | None) -> None:
        """Prepare eager passes, until the unit turns to replays if ``why`` is said in words.

        None: the step is repeated, on all ranks. Raises as :meth:`MismatchPolicy.mismatched`.
        """
        self.mismatches.conditions.flush_prefetch()
        if isinstance(why, Mismatch):
            self.mismatches.mismatched(why, self.name, collectives=self.collectives)
        elif why is not None:
            self.turn(f"eager passes, since {why}", "eager", replays=False)
        self.mismatches.counters.eager += 1

    def run_eagerly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a prepared pass, which is a call of ``function``."""
        outputs = function(*args, **kwargs)
        return as_one_node(outputs) if self._one_node else outputs

    def turn(self, words: str, name: str, *, replays: bool) -> None:
        """Turn to replays or to eager passes; see Note [Turns]. Raises ReplayMismatchError."""
        if self._in_replay_mode is replays:
            return
        if self.collectives:
            text = f"{self.name} turns to {words}, on this rank."
            self.mismatches.fall_back_together(f"{self.name}/{name}", text, agreement.TIMEOUT)
        self._in_replay_mode = replays

    def forbids(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """What forbids a replay with these arguments, also a verification, if one is due."""
        mismatch = self._guard.broken(args, kwargs)
        mismatch = mismatch or self.mismatches.other_setting(self._index)
        mismatch = mismatch or self._verifications.refuted.get(self._index)
        if mismatch is None and (self._index in self._verifications.due or not self._has_replayed):
            self.mismatches.conditions.flush_prefetch()
            return self._verify(args, kwargs)
        return mismatch

    def replay(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the graph returns for arguments of which :meth:`forbids` found nothing."""
        is_first, self._has_replayed = not self._has_replayed, True
        self.mismatches.counters.replayed += 1
        # Only a replay gets aliases of leaves. Autocast casts a leaf once in a step and adds up
        # the gradients of its uses before it casts them back, so an eager pass must get the leaf.
        is_replay, given = self.in_flight.has, self._unit.to_graph(args, kwargs)
        own = partial(own_gradient, is_replay=is_replay, always=self._gives_copies)
        inputs, named = map(own, given[0]), {name: own(one) for name, one in given[1].items()}
        outputs = self.graph(*inputs, **named)
        if is_first:
            memory = self._guard.inputs.memory
            self._gives_copies = are_returned(memory, tree_flatten(outputs)[0])
            layer = self._unit.layer
            held = [local(one) for one in (*layer.parameters(), *layer.buffers())]
            plain = [one for one in held if type(one) in (torch.Tensor, nn.Parameter)]
            self._own = dict.fromkeys(one.untyped_storage().data_ptr() for one in plain)
        has_backward = self.in_flight.begin(
            self._index, self._unit, outputs, self._before_backward, len(args) + len(kwargs)
        )
        if self._constant:
            outputs = self._as_captured(outputs)
        if has_backward and not self._gives_copies:
            return outputs
        # Without a backward nothing tells how long outputs are used. So the caller gets copies,
        # except of what lies in the memory of weights or buffers: that it gets, as in eager passes.
        return tree_map(partial(copied, memory=dict(self._own)), outputs)

    def __getattr__(self, name: str) -> Any:
        # For reset, and for backward_dw, of which Megatron asks with hasattr whether it is there.
        return getattr(self.graph, name)

    def waits(self) -> Mismatch | None:
        """What says that the backward of an earlier replay is still to come; None if none is."""
        return self.in_flight.broken(self._index)

    def results_in_use(self) -> bool:
        """Whether what the last replay returned is in use; if so, later ones return copies."""
        in_use = self.in_flight.results_in_use(self._index)
        self._gives_copies = self._gives_copies or in_use
        return in_use

    def _as_captured(self, outputs: Any) -> Any:
        """``outputs`` that needed no gradient at capture need none.

        Autograd gives one to every floating-point output of a replay. A unit's state that its own
        code has detached would then tie a pass to the one before.
        """
        flat, spec = tree_flatten(outputs)
        for number in self._constant:
            if isinstance(flat[number], torch.Tensor):
                flat[number] = flat[number].detach()
        return tree_unflatten(flat, spec)

    def _verify(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mismatch | None:
        """Compare a replay with an eager pass; see the notes in ``verify.py``."""
        gradients = self._prepare_backward() and self._guard.addresses.broken(forward=False) is None
        on_any_rank = partial(self.mismatches.on_any_rank, self.name, timeout=None)
        # With the backend's own function, not the one that the fast path installs instead.
        with undone_after(self.replay_function.replace(self.replay_function.function)):
            found, unstable = verify(
                self._unit,
                self.graph,
                args,
                kwargs,
                self._kept,
                gradients=gradients,
                on_any_rank=on_any_rank if self.collectives else bool,
            )
        self.mismatches.counters.gradients_unstable += unstable
        # A bound of rows may explain it. All ranks ask, whatever they have found.
        if self.collectives and not self.mismatches.conditions.within_row_bound():
            found = None
        return self._verifications.ended(self._index, found, gradients=gradients)

    def _before_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Check addresses and incoming gradients, after FSDP has unsharded.

        FSDP's hook for that is on the layer's outputs. A node's own hooks run after the hooks on
        the gradients that it receives (torch 2.11, ``engine.cpp``, ``call_function``).
        """
        mismatch = self._guard.broken_in_backward() or self._unit.broken(gradients)
        if mismatch is not None:
            self.mismatches.mismatched_in_backward(mismatch, self.name)
        self.mismatches.counters.backwards += 1


def are_returned(inputs: Sequence[range], outputs: Sequence[Any]) -> bool:
    """Whether an output of a graph lies in the memory of its inputs, of which it has two.

    A graph copies one input after another (TE 2.20.2). It would overwrite such an output that
    comes back as another input before it reads it.
    """
    addresses = [value.data_ptr() for value in outputs if isinstance(value, torch.Tensor)]
    return len(inputs) > 1 and any(one in own for own in inputs for one in addresses)
