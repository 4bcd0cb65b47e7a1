"""What runs before and after each of Megatron's training steps.

Note [When ranks vote]
    A rank knows its request once its backward passes are done. When the optimizer's step returns,
    the GPU still works on it and the host is about to wait for the GPU. After ``train_step`` the
    GPU waits for the host. So ranks vote when the optimizer's step returns, or after the training
    step if the optimizer took no step.

``train`` looks up ``train_step`` as a global of its module for each step, and ``train_step`` calls
``optimizer.step`` at most once. Between two steps no work is in flight: Megatron itself captures
there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.static_inputs import StaticInputs
from megatron_cg.upstream.patch import put_over, run_after
from megatron_cg.upstream.symbols import Symbol

if TYPE_CHECKING:  # It imports this module.
    from megatron_cg.integrations.megatron.helper import FsdpCudaGraphHelper

_OPTIMIZER, _ITERATION = "optimizer", "iteration"
_STEP = Symbol(
    "megatron-core",
    "megatron.training.training:train_step",
    "one training step",
    parameters=(_OPTIMIZER, _ITERATION),
)
RELIES_ON = (_STEP,)


class StepRoutine:
    """What one helper does before and after each step.

    Args:
        controller: controls the helper's graphs.
        static_inputs: observes the steps before capture.
    """

    def __init__(self, controller: GraphController, static_inputs: StaticInputs) -> None:
        self._controller, self._static_inputs = controller, static_inputs
        self._stop_observing: Callable[[], None] | None = None
        self.number: int | None = None
        """The number of the step that runs, from 1, as in the log; None if unknown."""

    def before_step(self, done: int | None = None) -> None:
        """Apply the decision of all ranks, and begin the step after ``done`` others."""
        self.number = done + 1 if done is not None else None
        self._controller.before_step()
        if self._controller.session is not None:
            self._controller.session.mismatches.begin_step()
        elif self._controller.awaits_capture:
            self._stop_observing = self._static_inputs.observe_step()

    def after_step(self) -> None:
        """End the step. Also runs after an exception; then there is no vote."""
        stop, self._stop_observing = self._stop_observing, None
        if stop is not None:
            stop()

    def vote(self, step: int | None) -> None:
        """Post this rank's request after training step ``step``, as Megatron counts it."""
        self._controller.after_step(step)

    def close(self) -> None:
        """Stop voting and destroy the votes' process group, before the other groups."""
        self.after_step()
        self._controller.close()


class _Votes:
    """The vote of the current step: when the optimizer's step returns, or afterwards."""

    def __init__(self) -> None:
        self.due: Callable[[], None] | None = None
        """Votes; None once this step has voted, and after a step that raised."""
        self._followed: list[Any] = []
        self.undo = ExitStack()

    def follow(self, optimizer: Any) -> None:
        """Vote whenever its steps return, from now on; once for each optimizer."""
        if not any(optimizer is known for known in self._followed):
            self._followed.append(optimizer)
            self.undo.callback(run_after(optimizer, "step", self.vote))

    def vote(self) -> None:
        """Vote, unless this step has voted already."""
        due, self.due = self.due, None
        if due is not None:
            due()


def follow_steps(helpers: Sequence[FsdpCudaGraphHelper]) -> Callable[[], None]:
    """Run the routines of ``helpers`` around each training step; returns the undo.

    ``helpers`` is read again at each step. Raises UpstreamChangedError if ``train_step`` is
    missing.
    """
    old = _STEP.find()
    place = list(inspect.signature(old).parameters).index(_OPTIMIZER)
    votes = _Votes()

    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        routines = [helper.steps for helper in helpers if helper.steps is not None]
        optimizer = args[place] if len(args) > place else kwargs[_OPTIMIZER]
        votes.follow(optimizer)

        def vote() -> None:
            for routine in routines:
                routine.vote(kwargs.get(_ITERATION))

        with ExitStack() as undo:
            for routine in routines:
                undo.callback(routine.after_step)
            for routine in routines:
                routine.before_step(kwargs.get(_ITERATION))
            votes.due = vote
            try:
                result = old(*args, **kwargs)
            except BaseException:
                votes.due = None
                raise
        votes.vote()
        return result

    undo = put_over(*_STEP.place(), train_step)

    def stop() -> None:
        undo()
        votes.undo.close()
        for helper in helpers:
            if helper.steps is not None:
                helper.steps.close()
            helper.undo.close()

    return stop
