"""Repeats a training step in which a rank had more rows for another than its graphs have room for.

Megatron's ``train`` looks up ``train_step`` as a global of its module for each step, and
``train_step`` gets the function that runs all forward and backward passes as an argument. Here this
function runs them once by graphs. If the bound of ``--cg-moe-rows`` was exceeded on any rank, all
ranks restore what the passes changed (``step_state.py``) and run them once more eagerly, where
Megatron's dispatcher drops nothing. So the optimizer only sees gradients of a pass without a bound.

Note [What it costs]
    Without a repeat: one all-reduce of four bytes, copies of the model's small buffers, and a wait
    of the host until the last forward pass is done (Note [When the host knows] in
    ``moe/row_bound.py``). The GPU still has the last backward pass to run then.

Note [Verification]
    A replay beyond the bound differs from the eager pass that ``--cg-verify-interval`` runs beside
    it, on all ranks that exchange anything with it. So a difference counts only while no rank has
    exceeded the bound in this step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from megatron_cg.capture.session import Session
from megatron_cg.events import StepRepeated, emit
from megatron_cg.integrations.megatron.step_state import StepState
from megatron_cg.moe.row_bound import RowBound
from megatron_cg.replay.mismatch_policy import MismatchPolicy
from megatron_cg.upstream.patch import put_over
from megatron_cg.upstream.symbols import Symbol

_FUNCTION, _FORWARD, _DATA = "forward_backward_func", "forward_step_func", "data_iterator"
_LOOP = Symbol("megatron-core", "megatron.training.training", "Megatron's training loop")
_STEP = Symbol(
    "megatron-core",
    "megatron.training.training:train_step",
    "one training step",
    parameters=("model", "optimizer", _FUNCTION, "iteration"),
)
RELIES_ON = (_LOOP, _STEP)


class Graphed(Protocol):
    """A capture helper, as far as its steps are repeated."""

    @property
    def session(self) -> Session | None:
        """The current graphs; None if there are none."""


def repeat_steps(helpers: Sequence[Graphed], bound: RowBound) -> Callable[[], None]:
    """Repeat each training step that exceeds ``bound``; returns the undo.

    ``helpers`` is read again at each step; a step without graphs is Megatron's own. Raises
    UpstreamChangedError if ``train_step`` is not as relied on.
    """
    old, module = _STEP.find(), _LOOP.find()
    names = list(inspect.signature(old).parameters)
    states: WeakKeyDictionary[Session, StepState] = WeakKeyDictionary()

    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        sessions = [helper.session for helper in helpers if helper.session is not None]
        if not sessions:
            return old(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        model = given["model"]
        if sessions[0] not in states:
            states[sessions[0]] = StepState(model)

        def clear() -> None:
            for chunk in model:
                chunk.zero_grad_buffer()
            given["optimizer"].zero_grad()

        run = _Repeatable(given[_FUNCTION], bound, sessions, states[sessions[0]], clear)
        if given.get("iteration") is not None:
            run.step = given["iteration"] + 1
        place = names.index(_FUNCTION)
        if len(args) > place:
            return old(*args[:place], run, *args[place + 1 :], **kwargs)
        return old(*args, **{**kwargs, _FUNCTION: run})

    return put_over(module, "train_step", train_step)


class _Repeatable:
    """All forward and backward passes of a step, repeated eagerly if they exceed the bound."""

    def __init__(
        self,
        function: Callable[..., Any],
        bound: RowBound,
        sessions: Sequence[Session],
        state: StepState,
        clear: Callable[[], None],
    ) -> None:
        self._function, self._bound, self._state = function, bound, state
        self._policies = [session.mismatches for session in sessions]
        self._clear = clear
        self.step: int | None = None
        """The step, as Megatron's log counts it: from 1."""

    def __call__(self, **options: Any) -> Any:
        """Megatron's function, with its arguments."""
        options[_DATA] = batches = _readable_again(options[_DATA])
        self._state.save()
        self._bound.begin_step()
        with _set(self._policies, "numbers_hold", self._bound.holds):
            result = self._function(**options | {_FORWARD: self._sharing(options)})
        rows = self._bound.exceeded()
        if not rows:
            return result
        del result
        emit(StepRepeated(self.step, rows, self._bound.bound, self._bound.enough(rows)))
        self._state.restore()
        for one in batches if isinstance(batches, list) else [batches]:
            if one is not None:
                one.rewind()
        self._clear()
        for policy in self._policies:
            policy.counters.repeated += 1
        with _set(self._policies, "repeats", True):
            return self._function(**options)

    def _sharing(self, options: dict[str, Any]) -> Callable[..., Any]:
        """The function of a microbatch's forward pass; see Note [When the host knows]."""
        old, left = options[_FORWARD], options["num_microbatches"]

        @wraps(old)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            result = old(*args, **kwargs)
            left -= 1
            if left == 0:
                self._bound.share()
            return result

        return forward_step


@contextmanager
def _set(policies: Sequence[MismatchPolicy], name: str, value: Any) -> Iterator[None]:
    before = [getattr(policy, name) for policy in policies]
    for policy in policies:
        setattr(policy, name, value)
    try:
        yield
    finally:
        for policy, old in zip(policies, before, strict=True):
            setattr(policy, name, old)


def _readable_again(data: Any) -> Any:
    """``train_step``'s ``data_iterator``: an iterator, a list of them, or None."""
    if isinstance(data, list):
        return [_readable_again(one) for one in data]
    return None if data is None else _Batches(data)


class _Batches:
    """The batches of one step, which can be read again."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._next = 0

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(next(self._iterator))
        self._next += 1
        # Megatron's functions add to the dictionary of a batch.
        return copy.copy(self._read[self._next - 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def rewind(self) -> None:
        """Begin again with the first batch of the step."""
        self._next = 0
