"""The training steps of a model with graphs, and the loops that announce them.

Note [When ranks vote]
    A rank knows its request once its backward passes are done. When the optimizer's step returns,
    the GPU still works on it and the host is about to wait for the GPU. After ``train_step`` the
    GPU waits for the host. So ranks vote when the optimizer's step returns, or after the training
    step if the optimizer took no step.

Note [Between two steps]
    What the ranks decided is done between two steps, where no work is in flight. Megatron's
    ``train_step`` still reads what the step has left after the optimizer's step (``clip_qk``), and
    its log the MoE metrics. So there a step ends when ``train_step`` returns. A loop that creates
    Megatron's helper itself has no such function, and its step ends with the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.static_inputs import StaticInputs
from megatron_cg.upstream.patch import Undo, all_of, put_over, run_after
from megatron_cg.upstream.symbols import Symbol

_ITERATION = "iteration"
_STEP = Symbol(
    "megatron.training.training:train_step",
    "one training step, a global that train() looks up for each",
    parameters=("optimizer", _ITERATION),
)
RELIES_ON = (_STEP,)


class Steps:
    """What a model's graphs need before and after each of its training steps.

    Args:
        controller: controls the graphs.
        inputs: observes the steps before capture.
    """

    def __init__(self, controller: GraphController, inputs: StaticInputs) -> None:
        self._controller, self._inputs = controller, inputs
        self._stop_observing: Undo | None = None
        self._voted = True
        self.number: int | None = None
        """The number of the step that runs, from 1, as in the log; None if unknown."""

    def begin(self, done: int | None = None) -> None:
        """Apply the decision of all ranks, and begin the step after ``done`` others."""
        self.number = done + 1 if done is not None else None
        self._voted = False
        self._controller.before_step()
        if self._controller.session is not None:
            self._controller.session.mismatches.begin_step()
        elif self._controller.awaits_capture:
            self._stop_observing = self._inputs.observe_step()

    def end(self) -> None:
        """End the step. A second call does nothing."""
        stop, self._stop_observing = self._stop_observing, None
        if stop is not None:
            stop()

    def vote(self) -> None:
        """Post this rank's request, unless it has voted in this step."""
        if not self._voted:
            self._voted = True
            self._controller.after_step(self.number)

    @contextmanager
    def one(self, done: int | None) -> Iterator[None]:
        """One step, after ``done`` others; a step that raises has no vote."""
        self.begin(done)
        try:
            yield
        except BaseException:
            self._voted = True
            raise
        finally:
            self.end()
        self.vote()

    def close(self) -> None:
        """Stop voting and destroy the votes' process group, before the other groups."""
        self.end()
        self._controller.close()


Source = Callable[[Steps, Sequence[Any]], Undo]
"""Announces steps until the undo that it returns; takes the optimizers of the model too."""


def by_train_step(steps: Steps, optimizers: Sequence[Any]) -> Undo:
    """Megatron's loop. Raises UpstreamChangedError if ``train_step`` is missing."""
    old = _STEP.find()

    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with steps.one(kwargs.get(_ITERATION)):
            return old(*args, **kwargs)

    def changes() -> Iterator[Undo]:
        yield put_over(*_STEP.place(), train_step)
        yield from (run_after(optimizer, "step", steps.vote) for optimizer in optimizers)

    return all_of(changes())


def by_optimizer(steps: Steps, optimizers: Sequence[Any]) -> Undo:
    """Any loop: a step ends when the step of the last optimizer returns, and the next begins."""

    def stepped() -> None:
        steps.end()
        steps.vote()
        steps.begin(steps.number)

    steps.begin(0)
    return all_of(run_after(optimizer, "step", stepped) for optimizer in optimizers[-1:])
