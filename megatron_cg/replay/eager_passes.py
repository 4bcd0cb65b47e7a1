"""What happens before a pass in which one unit runs eagerly instead of replaying its graph.

Note [Before anything runs eagerly]
    Two things happen first, whatever the reason for the eager pass. The all-gathers that the fast
    path defers until a launch are issued (Note [Launch first] in
    ``fastpath/gather.py``). If the unit's graphs contain collectives, all ranks
    vote (Note [A graph with collectives] in ``replay/mismatch_policy.py``). Otherwise one rank may
    run eagerly alone, and may have to give its gradients in the order of a replay
    (Note [When gradients are counted]).

Note [Turns]
    For a mismatch, ranks vote in each pass. For evaluation and deleted graphs, ranks vote only when
    a unit turns from replays to eager passes, and when it turns back. If one rank turns alone, its
    vote fails, in either direction. A vote on a turn has the long timeout: before the first pass
    after a turn, ranks may fetch data or write a checkpoint, and one rank may take minutes longer
    than another.

Note [When gradients are counted]
    Megatron-FSDP reduces a bucket once all its parameters have got a gradient. A replay is one
    node: it waits for the gradients of all its outputs, and then reaches all weights, those of an
    output that the loss does not use with no gradient. In an eager pass each weight gets its
    gradient as soon as the outputs that it needs have theirs, and the weights of an unused output
    are not reached. So if one rank falls back to eager alone, its buckets become ready in another
    order, and its collectives do not match those of the other ranks. Therefore a node ties the
    outputs of such a pass together. Autograd passes what is undefined on to the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_cg.consensus import exchange as agreement
from megatron_cg.ranges import in_range
from megatron_cg.replay.guard import Mismatch
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.upstream.patch import put_over

Prepared = Callable[[], Any] | Mismatch | None
"""What a call does: the replay, or an eager pass because of a mismatch. None: an eager pass that is
a part of a verification."""


class EagerPasses:
    """The eager passes of one unit.

    ``collectives`` says whether the unit's graphs contain collectives, as this rank found at
    capture and all ranks agree at its end. ``one_node``: gradients must come as from a replay.
    """

    def __init__(
        self, name: str, mismatches: MismatchPolicy, *, collectives: bool, one_node: bool = False
    ) -> None:
        self.name, self.collectives, self.one_node = name, collectives, one_node
        self._mismatches = mismatches
        self._replays = True

    def for_mismatch(self, mismatch: Mismatch) -> None:
        """Prepare this pass to run eagerly; raises as :meth:`MismatchPolicy.mismatched`."""
        self._mismatches.issue_held()
        self._mismatches.mismatched(mismatch, self.name, collectives=self.collectives)
        self._mismatches.counters.eager += 1

    def for_no_replay(self, why: str) -> None:
        """Prepare eager passes until :meth:`replay_follows`; ``why`` is the reason in words.

        Raises ReplayMismatchError if the graphs contain collectives and other ranks replay.
        """
        self._mismatches.issue_held()
        self._turn(f"eager passes, since {why}", "eager", replays=False)
        self._mismatches.counters.eager += 1

    @in_range("eager pass")
    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a prepared pass, which is a call of ``function``."""
        outputs = function(*args, **kwargs)
        return as_one_node(outputs) if self.one_node else outputs

    def for_repeat(self) -> None:
        """Prepare this pass to run eagerly in a step that all ranks have agreed to repeat."""
        self._mismatches.issue_held()
        self._mismatches.counters.eager += 1

    def replay_follows(self) -> None:
        """Prepare a replay of the unit. Raises as :meth:`for_no_replay`."""
        if not self._replays:
            self._turn("replays", "replayed", replays=True)

    def _turn(self, words: str, name: str, *, replays: bool) -> None:
        if self._replays is replays:
            return
        if self.collectives:
            text = f"{self.name} turns to {words}, on this rank."
            self._mismatches.fall_back_together(f"{self.name}/{name}", text, agreement.TIMEOUT)
        self._replays = replays


def replay_instead(
    layer: Any,
    prepare: Callable[[Sequence[Any], Mapping[str, Any]], Prepared],
    mismatches: MismatchPolicy,
) -> Callable[[], None]:
    """Replace the forward of ``layer``, whose ``cuda_graphs`` are set; returns the undo.

    ``prepare`` takes the arguments of a call in training.
    """
    eager = layer.forward
    passes: EagerPasses = layer.cuda_graphs[0].eager_passes

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.training or not torch.is_grad_enabled():
            passes.for_no_replay("it is in evaluation mode, or gradients are off")
            return eager(*args, **kwargs)
        if not layer.cuda_graphs:
            passes.for_no_replay("its graphs were deleted")
            return passes.run(eager, *args, **kwargs)
        prepared = prepare(args, kwargs)
        if prepared is None:
            return eager(*args, **kwargs)
        if isinstance(prepared, Mismatch):
            passes.for_mismatch(prepared)
            return passes.run(eager, *args, **kwargs)
        passes.replay_follows()
        try:
            return prepared()
        except Exception:
            mismatches.issue_held()
            raise

    return put_over(layer, "forward", forward)


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
    """``outputs``, whose gradients all arrive before any goes on; see the last note above."""
    flat, spec = tree_flatten(outputs)
    tensors = {id(t): t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad}
    if len(tensors) < 2:
        return outputs
    apply: Any = _Tie.apply
    tied = dict(zip(tensors, apply(*tensors.values()), strict=True))
    return tree_unflatten([tied.get(id(output), output) for output in flat], spec)
