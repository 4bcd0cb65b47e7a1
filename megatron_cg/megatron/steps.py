"""What is done around each of Megatron's training steps.

Relied on: megatron-core 0.19.2, ``megatron.training.training.train_step``, looked up as a global of
that module when ``train`` calls it. Between two steps nothing is under way: Megatron itself
captures there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from megatron_cg.agreement import Agreement
from megatron_cg.boundary import Boundary
from megatron_cg.static_inputs import StaticInputs
from megatron_cg.undo import set_attribute
from megatron_cg.verdict import Decision, Level, Verdict
from megatron_cg.versions import Symbol

if TYPE_CHECKING:
    from megatron_cg.megatron.helper import FsdpCudaGraphHelper

logger = logging.getLogger(__name__)

_LOOP = Symbol("megatron-core", "megatron.training.training", "Megatron's training loop")
_STEP = Symbol(
    "megatron-core",
    "megatron.training.training:train_step",
    "one training step",
    parameters=("iteration",),
)
RELIES_ON = (_LOOP, _STEP)


class StepRoutine:
    """One helper's part before and after each step.

    Args:
        helper: whose graphs are captured again or given up.
        agreement: with no vote posted.
        static_inputs: looks at the steps before capture.
    """

    def __init__(
        self, helper: FsdpCudaGraphHelper, agreement: Agreement, static_inputs: StaticInputs
    ) -> None:
        self._helper, self._agreement = helper, agreement
        self._static_inputs = static_inputs
        self._boundary = Boundary(agreement, self._verdict, helper.capture_again, self._give_up)
        self._stop_observing: Callable[[], None] | None = None

    def before_step(self) -> None:
        """Do what all ranks have decided, and begin the step."""
        self._boundary.before_step()
        if self._helper.session is not None:
            self._helper.session.watch.begin_step()
        elif not self._helper.capture_finished():
            self._stop_observing = self._static_inputs.observe_step()

    def after_step(self) -> None:
        """End the step; also after an exception, where nothing is voted on."""
        stop, self._stop_observing = self._stop_observing, None
        if stop is not None:
            stop()

    def vote(self, step: int | None) -> None:
        """Post what this rank wants, after a step that was trained, by Megatron's count of it."""
        self._boundary.after_step(step)

    def close(self) -> None:
        """Vote no more, and let the votes' process group go; before the others do."""
        self.after_step()
        self._boundary.close()
        self._agreement.close()

    def _verdict(self) -> Verdict:
        session = self._helper.session
        if session is None:
            return Verdict()
        wants = Level.RECAPTURE if session.watch.wants_recapture else Level.KEEP
        return Verdict(wants, graphs=session.digest)

    def _give_up(self, decision: Decision) -> None:
        logger.error("All ranks train eagerly from here on: %s.", decision.reason())
        if self._helper.session is not None:
            self._helper.delete_cuda_graphs()


def follow_steps(helpers: Sequence[FsdpCudaGraphHelper]) -> Callable[[], None]:
    """Let the routines of ``helpers`` run around each training step; returns the undo.

    ``helpers`` is read anew at each step. Raises UpstreamChangedError where ``train_step`` is gone.
    """
    old, module = _STEP.find(), _LOOP.find()

    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        routines = [helper.steps for helper in helpers if helper.steps is not None]
        try:
            for routine in routines:
                routine.before_step()
            result = old(*args, **kwargs)
        finally:
            for routine in routines:
                routine.after_step()
        for routine in routines:
            routine.vote(kwargs.get("iteration"))
        return result

    undo = set_attribute(module, "train_step", train_step)

    def stop() -> None:
        undo()
        for helper in helpers:
            if helper.steps is not None:
                helper.steps.close()
            helper.undo.close()

    return stop
