"""One graph with its guard: an item of ``layer.cuda_graphs``, which Megatron calls."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron_cg.ranges import named_range
from megatron_cg.replay.depends_on import DependsOn
from megatron_cg.replay.eager_passes import EagerPasses
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.in_flight import InFlight
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.replay.own_gradients import own_gradient
from megatron_cg.replay.unit import ReplayFunction, Unit
from megatron_cg.replay.verify import Kept, verify
from megatron_cg.upstream.patch import undone_after


class GuardedGraph:
    """Replays its graph if the guard allows it; otherwise runs the captured region eagerly.

    The first replay is verified beside an eager pass, whatever the policy: its values are others
    than those of the capture, so it finds what no row of the table foresees. Later ones are when
    their unit is due. A graph that a verification has refuted is not replayed again.

    ``index`` is the unit's, in the order of forward passes. ``prepare_backward`` is that of the
    sharding. For ``kept`` see :func:`megatron_cg.replay.verify.verify`.
    """

    def __init__(
        self,
        graph: Any,
        depends_on: DependsOn,
        unit: Unit,
        mismatches: MismatchPolicy,
        *,
        index: int,
        in_flight: InFlight,
        eager_passes: EagerPasses,
        replay: ReplayFunction,
        kept: Kept,
        prepare_backward: Callable[[], bool],
    ) -> None:
        self.eager_passes = eager_passes
        self.graph, self._guard = graph, depends_on
        self._unit, self._index = unit, index
        self._eager = unit.eager or unit.run
        self._mismatches, self.in_flight, self._kept = mismatches, in_flight, kept
        self._verifications = mismatches.verifications
        self._replay, self._prepare_backward = replay, prepare_backward
        self._replayed = self._gives_copies = False
        self._constant = tuple(n for n, needed in enumerate(replay.needs) if not needed)
        """Which outputs need no gradient."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, or run the region eagerly.

        Raises ReplayMismatchError; see :class:`MismatchPolicy`.
        """
        if self._mismatches.repeats:
            self.eager_passes.for_repeat()
            return self.eager_passes.run(self._eager, self._unit.layer, args, kwargs)
        counters = self._mismatches.counters
        with named_range("guard"):
            mismatch = self._guard.broken(args, kwargs)
            mismatch = mismatch or self._mismatches.other_switch
            mismatch = mismatch or self._verifications.refuted.get(self._index)
        if mismatch is None and (self._index in self._verifications.due or not self._replayed):
            self._mismatches.issue_held()
            with named_range("verification"):
                mismatch = self._verify(args, kwargs)
        if mismatch is not None:
            self.eager_passes.for_mismatch(mismatch)
            return self.eager_passes.run(self._eager, self._unit.layer, args, kwargs)
        is_first, self._replayed = not self._replayed, True
        counters.replayed += 1
        with named_range("replay"):
            outputs = self._replayed_with(args, kwargs)
        if is_first:
            self._gives_copies = self._guard.inputs.are_returned(tree_flatten(outputs)[0])
        has_backward = self.in_flight.begin(
            self._index, self._unit, outputs, self._before_backward, len(args) + len(kwargs)
        )
        if self._constant:
            outputs = self._as_captured(outputs)
        # Without a backward nothing tells how long outputs are used, so the caller gets copies.
        return outputs if has_backward and not self._gives_copies else tree_map(_own, outputs)

    def __getattr__(self, name: str) -> Any:
        # For reset, and for backward_dw, of which Megatron asks with hasattr whether it is there.
        return getattr(self.graph, name)

    def out_of_order(self) -> Mismatch | None:
        """What waits for its backward, or is still in use, and forbids a replay now; or None.

        See Note [Outputs that outlive their pass] in ``in_flight.py``.
        """
        mismatch = self.in_flight.broken(self._index)
        if mismatch is None and self.in_flight.is_kept(self._index):
            self._gives_copies = True
            return Mismatch(
                "order",
                "the outputs and input gradients of earlier passes",
                "released after their backward",
                "still in use",
                "A replay would overwrite them. The unit runs eagerly until they are dropped, and "
                "gives copies from then on, which takes time: copy what you keep.",
            )
        return mismatch

    def _replayed_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Only a replay gets aliases of leaves. Autocast casts a leaf once in a step and adds up
        # the gradients of its uses before it casts them back, so an eager pass must get the leaf.
        is_replay = self.in_flight.has
        args, kwargs = self._unit.gradients.given(args, kwargs)
        given = partial(own_gradient, is_replay=is_replay, always=self._gives_copies)
        inputs, named = map(given, args), {name: given(value) for name, value in kwargs.items()}
        return self.graph(*inputs, **named)

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
        """Compare a replay with an eager pass; see Note [A backward pass in the forward pass]."""
        gradients = self._prepare_backward() and self._guard.addresses.are_as_in_backward()
        on_any_rank = partial(self._mismatches.on_any_rank, self._unit.name, timeout=None)
        # With the backend's own function, not the one that the fast path installs instead.
        with undone_after(self._replay.replace(self._replay.function)):
            found = verify(
                self._unit,
                self.graph,
                args,
                kwargs,
                self._kept,
                gradients=gradients,
                left_out=self._mismatches.counters.count_unstable,
                on_any_rank=on_any_rank if self.eager_passes.collectives else bool,
            )
        # A bound of rows may explain it. All ranks ask, whatever they have found.
        if self.eager_passes.collectives and not self._mismatches.numbers_hold():
            found = None
        return self._verifications.ended(self._index, found, gradients=gradients)

    def _before_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Check addresses and incoming gradients before the backward replay.

        And after FSDP has unsharded.

        FSDP's unsharding hook is on the layer's outputs. A node's own hooks run after the hooks on
        the gradients that it receives (torch 2.11, ``engine.cpp``, ``call_function``).
        """
        mismatch = self._guard.broken_in_backward() or self._unit.gradients.broken(gradients)
        if mismatch is not None:
            self._mismatches.mismatched_in_backward(mismatch, self._unit.name)
        self._mismatches.counters.backwards += 1


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
