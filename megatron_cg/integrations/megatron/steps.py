"""The training steps of a model with graphs: what announces them, and what repeats one eagerly.

Loops on megatron-core get the function of a step's passes from ``get_forward_backward_func``. Here
this function repeats a step as ``integrations/repeated_step.py`` says, on all ranks. In the eager
passes Megatron's dispatcher drops nothing.

Note [What a bound costs]
    Without a repeat: one all-reduce of eight bytes, copies of the model's buffers, and a wait
    of the host until the last forward pass is done (Note [When the host knows] in
    ``experts/row_bound.py``). The GPU still has the last backward pass to run then.

Note [Verification]
    A replay beyond the bound differs from the eager pass that ``--cg-verify-interval`` runs beside
    it, on all ranks that exchange anything with it. So a difference counts only while no rank has
    exceeded the bound in this step.

A loop that does what ``_REFUSED`` lists ends with an error before its optimizer changes a weight. A
verification takes the first of several calls for the same gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from megatron_cg.capture.session import GraphController, Session
from megatron_cg.errors import ConfigurationError, Violation, say
from megatron_cg.extensions import experts_of
from megatron_cg.fsdp.sharding import root_of
from megatron_cg.integrations.megatron.megatron_unit import ObservedInputs
from megatron_cg.integrations.repeated_step import Batches, train_step
from megatron_cg.upstream import patch
from megatron_cg.upstream.symbols import Symbol

if TYPE_CHECKING:
    from megatron_cg.experts.row_bound import RowBound

_ITERATION = "iteration"
_STEP = Symbol(
    "megatron.training.training:train_step",
    "one training step, a global that train() looks up for each",
    parameters=(_ITERATION,),
)
_FORWARD, _DATA, _MODEL = "forward_step_func", "data_iterator", "model"
_MICROBATCHES, _EVALUATES = "num_microbatches", "forward_only"
_PASSES = Symbol(
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
    "all passes of a step without pipeline parallelism",
    parameters=(_FORWARD, _DATA, _MODEL, _MICROBATCHES, _EVALUATES),
)
RELIES_ON = (_STEP, _PASSES)
_VERIFIED = "--cg-verify-steps"


class Steps:
    """What a model's graphs need before and after each of its training steps.

    ``inputs`` observes those before the capture.
    """

    def __init__(self, controller: GraphController, inputs: ObservedInputs) -> None:
        self.controller, self._inputs = controller, inputs
        self._stop_observing: patch.Undo | None = None
        self.number: int | None = None
        """The number of the step that runs, from 1, as in the log; None if unknown."""

    def begin(self, done: int | None = None) -> None:
        """Begin the step after ``done`` others."""
        self.number = done + 1 if done is not None else None
        self.controller.begin_step()
        if self.controller.awaits_capture:
            self._stop_observing = self._inputs.observe_step()

    def end(self) -> None:
        """End the step. A second call does nothing."""
        stop, self._stop_observing = self._stop_observing, None
        if stop is not None:
            stop()

    def close(self) -> None:
        """Stop voting and destroy the votes' process group, before the other groups."""
        with patch.undone_after(self.controller.close):
            self.end()


Source = Callable[[Steps, Sequence[Any]], patch.Undo]
"""Announces steps until the undo that it returns; takes the optimizers of the model too."""


def by_train_step(steps: Steps, _optimizers: Sequence[Any]) -> patch.Undo:
    """Megatron's loop. Raises UpstreamChangedError if ``train_step`` is missing."""

    def train_step(old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        steps.begin(kwargs.get(_ITERATION))
        with patch.undone_after(steps.end):
            return old(*args, **kwargs)

    return patch.run_instead(_STEP, train_step)


def by_optimizer(steps: Steps, optimizers: Sequence[Any]) -> patch.Undo:
    """Any loop: a step ends when the step of the last optimizer returns, and the next begins."""

    def stepped() -> None:
        steps.end()
        steps.begin(steps.number)

    steps.begin(0)
    return patch.combine_undos(
        patch.wrap_method(optimizer, "step", after=stepped) for optimizer in optimizers[-1:]
    )


_REFUSED = {
    "repeat-outside-schedule": (
        "passes that Megatron's schedule did not run",
        "these passes cannot be repeated: a step beyond the bound would drop tokens, and one that "
        "is due for verification is not verified",
        "run all passes by megatron.core.pipeline_parallel.get_forward_backward_func(), and call "
        "that after megatron_cg.enable(); or",
    ),
    "repeat-second-call": (
        "a second call of forward_backward_func for the same gradients",
        "a step that exceeds the bound is repeated with cleared gradients, so those of the first "
        "call would be lost",
        "call model.zero_grad_buffer() before each call and train all microbatches in one, or",
    ),
    "repeat-batches-elsewhere": (
        "passes that took no batch from data_iterator",
        "a step is repeated with the batches of its data_iterator, and others cannot be read again",
        "let forward_step_func read its batches from the data_iterator that it is given, or",
    ),
}
"""By rule: what was found besides the flag, why it matters, and what to do."""


def _refused(rule: str, flag: str) -> ConfigurationError:
    setting, (found, reason, remedy) = say(f"{{flag:{flag}}}"), _REFUSED[rule]
    remedy = f"{remedy} leave {setting} out"
    return ConfigurationError([Violation(rule, f"{setting}, and {found}", reason, remedy)])


_repeaters: "WeakKeyDictionary[nn.Module, _Repeater]" = WeakKeyDictionary()
"""By the ``MegatronFSDP`` of a model."""


def repeat_steps() -> patch.Undo:
    """Let Megatron's schedule repeat steps of models that need it; returns the undo.

    Raises UpstreamChangedError if the schedule is not as relied on.
    """

    def passes(old: Callable[..., Any], **options: Any) -> Any:
        model = options[_MODEL]
        root = root_of(model[0] if isinstance(model, list) else model)
        repeater = _repeaters.get(root) if root is not None else None
        session = repeater.steps.controller.session if repeater is not None else None
        if repeater is None or session is None or repeater.running or options.get(_EVALUATES):
            return old(**options)
        with patch.undone_after(patch.set_attribute(repeater, "running", True)):
            return repeater.run(session, old, options)

    return patch.run_instead(_PASSES, passes)


@patch.combined_undo
def repeat_if_needed(
    model: Sequence[Any], optimizers: Sequence[Any], steps: Steps, *, verifies: bool = False
) -> Iterator[patch.Undo]:
    """Repeat steps of ``model`` if its layers have a bound of rows, or its steps are verified."""
    root: Any = root_of(model[0])
    experts = experts_of(root)
    bound = None if experts is None else experts.bound
    if bound is None and not verifies:
        return
    repeater = _Repeater(model, optimizers, steps, bound)
    yield patch.wrap_method(model[0], "zero_grad_buffer", after=repeater.begin)
    for optimizer in optimizers:
        yield patch.wrap_method(optimizer, "step", before=repeater.check)
    _repeaters[root] = repeater
    yield partial(_repeaters.__delitem__, root)


@dataclass(eq=False)
class _Repeater:
    """Runs the steps of one model, and repeats those that need it."""

    model: Sequence[Any]
    optimizers: Sequence[Any]
    steps: Steps
    bound: "RowBound | None"
    running: bool = False
    """Whether :meth:`run` is under way; another replacement of the schedule is inside of it."""
    _ran: bool = False
    _seen: WeakKeyDictionary[Session, tuple[int, int]] = field(default_factory=WeakKeyDictionary)
    """Replays whose rows were looked at, and the last step."""

    def begin(self) -> None:
        """Gradients were cleared."""
        self._ran = False

    def check(self) -> None:
        """Raise ConfigurationError if replays that had to be in a call of :meth:`run` were not."""
        session = self.steps.controller.session
        if session is None:
            return
        replays, step = self._seen.get(session, (0, -1))
        if self.bound is not None and session.counters.replayed != replays:
            raise _refused("repeat-outside-schedule", self.bound.flag)
        if session.mismatches.verifies_step and session.mismatches.verifications.step != step:
            raise _refused("repeat-outside-schedule", _VERIFIED)

    def run(self, session: Session, passes: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Run the passes of a step by the graphs of ``session``, and repeat them if needed."""
        mismatches, bound = session.mismatches, self.bound
        conditions = mismatches.conditions
        is_second, self._ran = self._ran, True
        if is_second and bound is not None:
            raise _refused("repeat-second-call", bound.flag)
        self._seen[session] = self._seen.get(session, (0, 0))[0], mismatches.verifications.step
        if bound is None and (is_second or not mismatches.verifies_step):
            return passes(**options)
        data = options[_DATA]
        if isinstance(data, list):
            (data,) = data  # one chunk of the model, without pipeline parallelism
        batches = options[_DATA] = None if data is None else Batches(data)

        def by_graphs() -> Any:
            with ExitStack() as stack:
                given = options
                if bound is not None:
                    # Not inside of a step of another model that is bounded by the same object.
                    outer = (one for one in _repeaters.values() if one is not self and one.running)
                    if all(one.bound is not bound for one in outer):
                        bound.begin_step()
                    stack.callback(patch.set_attribute(conditions, "within_row_bound", bound.holds))
                    step = bound.sharing(options[_FORWARD], options[_MICROBATCHES])
                    given = options | {_FORWARD: step}
                result = passes(**given)
            self._seen[session] = session.counters.replayed, mismatches.verifications.step
            if batches is not None and not batches.taken:
                flag = _VERIFIED if bound is None else bound.flag
                raise _refused("repeat-batches-elsewhere", flag)
            return result

        def eagerly() -> Any:
            if batches is not None:
                batches.rewind()
            for chunk in self.model:
                chunk.zero_grad_buffer()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self._ran = True
            return passes(**options)

        return train_step(session, by_graphs, eagerly, bound=bound, number=self.steps.number)
