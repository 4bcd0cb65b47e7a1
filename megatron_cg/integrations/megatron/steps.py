"""The training steps of a model with graphs, and the loops that announce them.

In Megatron's loop a step is a call of ``train_step``. A loop that creates Megatron's helper itself
has no such function, and its step ends with the optimizer's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.static_inputs import StaticInputs
from megatron_cg.upstream.patch import Undo, all_of, put_over, run_around
from megatron_cg.upstream.symbols import Symbol

_ITERATION = "iteration"
_STEP = Symbol(
    "megatron.training.training:train_step",
    "one training step, a global that train() looks up for each",
    parameters=(_ITERATION,),
)
RELIES_ON = (_STEP,)


class Steps:
    """What a model's graphs need before and after each of its training steps.

    ``inputs`` observes those before the capture.
    """

    def __init__(self, controller: GraphController, inputs: StaticInputs) -> None:
        self._controller, self._inputs = controller, inputs
        self._stop_observing: Undo | None = None
        self.number: int | None = None
        """The number of the step that runs, from 1, as in the log; None if unknown."""

    def begin(self, done: int | None = None) -> None:
        """Begin the step after ``done`` others."""
        self.number = done + 1 if done is not None else None
        self._controller.begin_step()
        if self._controller.session is None and self._controller.awaits_capture:
            self._stop_observing = self._inputs.observe_step()

    def end(self) -> None:
        """End the step. A second call does nothing."""
        stop, self._stop_observing = self._stop_observing, None
        if stop is not None:
            stop()

    @contextmanager
    def one(self, done: int | None) -> Iterator[None]:
        """One step, after ``done`` others."""
        self.begin(done)
        try:
            yield
        finally:
            self.end()

    def close(self) -> None:
        """Stop voting and destroy the votes' process group, before the other groups."""
        self.end()
        self._controller.close()


Source = Callable[[Steps, Sequence[Any]], Undo]
"""Announces steps until the undo that it returns; takes the optimizers of the model too."""


def by_train_step(steps: Steps, _optimizers: Sequence[Any]) -> Undo:
    """Megatron's loop. Raises UpstreamChangedError if ``train_step`` is missing."""
    old = _STEP.find()

    @wraps(old)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with steps.one(kwargs.get(_ITERATION)):
            return old(*args, **kwargs)

    return put_over(*_STEP.place(), train_step)


def by_optimizer(steps: Steps, optimizers: Sequence[Any]) -> Undo:
    """Any loop: a step ends when the step of the last optimizer returns, and the next begins."""

    def stepped() -> None:
        steps.end()
        steps.begin(steps.number)

    steps.begin(0)
    return all_of(run_around(optimizer, "step", after=stepped) for optimizer in optimizers[-1:])
