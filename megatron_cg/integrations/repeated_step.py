"""Trains a step by graphs and, if there is a reason, once more eagerly.

A reason is that a rank had more rows for another than the graphs have room for (``--cg-moe-rows``),
or that the step is verified (``--cg-verify-steps``): then the digests of all numbers that it leaves
for the optimizer are compared. Either way training continues with the eager numbers.

Note [Numbers that differ by themselves]
    Without deterministic algorithms two eager steps differ too. So a difference then counts only if
    a second eager step has the same number as the first. With them, a second one that differs shows
    that the step changes something that is not restored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from megatron_cg.capture.session import Session
from megatron_cg.consensus.exchange import TIMEOUT
from megatron_cg.errors import STEP_DIFFERS
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.integrations.step_state import StepState
from megatron_cg.replay.plain import is_plain
from megatron_cg.replay.verify import Digests
from megatron_cg.restore import Restores
from megatron_cg.telemetry import step_repeated, step_verified
from megatron_cg.upstream.patch import set_attribute, undone_after

if TYPE_CHECKING:
    from megatron_cg.experts.row_bound import RowBound

_SHOWN = 8
_CAUSE = "No guard saw it, so the cause may lie between units: please report it, with this line."
_UNCHANGED = (
    "Two eager trainings of it differ too: it changes what is not restored, such as weights, or a "
    "count or iterator of the loop. Change that outside of the step that is verified, or keep it "
    "in a module's buffer or attribute."
)


def gradients_saved(sharding: Sharding) -> Callable[[], None]:
    """Save the gradients of a model; returns what restores them, or clears Megatron-FSDP's."""
    clear: Any = getattr(sharding.wrapped, "zero_grad_buffer", None)
    if clear is not None:
        return clear  # type: ignore[no-any-return]

    def owners() -> dict[tuple[int, str], Any]:
        """What may hold a gradient, by id and attribute."""
        own = ((parameter, "grad") for parameter in sharding.network.parameters())
        return {(id(owner), name): owner for owner, name in (*own, *sharding.gradient_owners())}

    saved = {}
    for (key, name), owner in owners().items():
        grad = getattr(owner, name, None)
        saved[key, name] = owner, grad, None if grad is None else grad.clone()

    def restore() -> None:
        # FSDP2's modules may have held other parameters before: the unsharded ones.
        now = {place: (owner, None, None) for place, owner in owners().items()}
        with Restores() as stack:
            for (_, name), (owner, grad, values) in (now | saved).items():
                stack.restore("a gradient", setattr, owner, name, grad)
                if grad is not None:
                    stack.restore("a gradient", grad.copy_, values)

    return restore


class Batches:
    """The batches of one step, which can be read again."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._next = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(next(self._iterator))
        self._next += 1
        # Megatron's functions add to the dictionary of a batch.
        return copy.copy(self._read[self._next - 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    @property
    def was_read(self) -> bool:
        """Whether the step took a batch from it."""
        return bool(self._read)

    def rewind(self) -> None:
        """Begin again with the first batch of the step."""
        self._next = 0


def train_step(
    session: Session,
    by_graphs: Callable[[], Any],
    eagerly: Callable[[], Any],
    *,
    bound: RowBound | None = None,
    number: int | None = None,
) -> Any:
    """Train all passes of a step, and return what they return.

    ``eagerly`` trains them once more, with the same batches and cleared gradients. ``number`` is
    the step's in the log. All ranks call it. Raises ReplayMismatchError as ``step_differed``.
    """
    mismatches, counters = session.mismatches, session.counters
    verifies = mismatches.verifies_step
    if mismatches.conditions.repeats or not (verifies or bound):
        return by_graphs()
    state = StepState([session.sharding.network], session.units)
    result = by_graphs()
    rows = bound.exceeded() if bound is not None else 0
    if not rows and not verifies:
        return result
    replayed = _digests(session, state, result) if not rows else None
    del result

    def repeated() -> Any:
        state.restore()
        with undone_after(set_attribute(mismatches.conditions, "repeats", True)):
            return eagerly()

    if bound is not None and rows:
        step_repeated(number, rows, bound.bound, bound.enough(rows))
        counters.repeated += 1
    eager_passes = counters.eager
    result = repeated()
    if replayed is None:
        return result
    eager = _digests(session, state, result)
    found = replayed.differences(eager)
    differs = mismatches.on_any_rank("a verified step", bool(found), TIMEOUT)
    unstable: list[str] = []
    if differs:
        result = repeated()
        unstable = eager.differences(_digests(session, state, result))
    if differs and not torch.are_deterministic_algorithms_enabled():
        found = [name for name in found if name not in unstable]
        differs, unstable = bool(found), []
        differs = mismatches.on_any_rank("a verified step, again", differs, TIMEOUT)
    counters.steps_verified, counters.eager = counters.steps_verified + 1, eager_passes
    step_verified(number, str(eager))
    if differs:
        mismatches.step_differed(_text(number, found, eager, _UNCHANGED if unstable else _CAUSE))
    return result


def _digests(session: Session, state: StepState, result: Any) -> Digests:
    """Of what a step has left, the last layer's gradients first."""

    def named() -> Iterator[tuple[str, Any]]:
        leaves, _ = tree_flatten_with_path(result)
        for path, value in leaves:
            if isinstance(value, torch.Tensor) or is_plain(value):
                yield f"result{keystr(path)}", value
        for name, gradient in session.sharding.gradients():
            yield f"gradient {name}", gradient
        yield from state.tensors()

    return Digests(named())


def _text(number: int | None, found: list[str], eager: Digests, cause: str) -> str:
    step = "A step" if number is None else f"Step {number}"
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    names = ", ".join(found[:_SHOWN]) + more if found else "none on this rank, see another's log"
    return (
        f"{step}, {STEP_DIFFERS}: {names}. Gradients are "
        f"named in the order of the backward pass, the last layer first. Compared: {eager}. {cause}"
    )
