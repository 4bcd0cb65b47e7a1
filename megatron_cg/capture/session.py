"""One model's graphs, from before capture until they are released.

Note [Where ranks vote on a capture]
    Ranks vote twice: before the first hook runs, and when nothing can fail on a single rank any
    more (the graphs are complete, the changes of capture are undone, the fast path is installed).
    A rank that fails before the first vote votes at once. One that fails later votes after it has
    undone all changes, which may issue all-gathers as on the others. If training must not continue
    without graphs (``run_remaining_hooks`` is false), a rank that fails among the hooks exits, and
    its launcher ends the others. If it fails after the hooks, all vote and end with the cause.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from enum import Enum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

import torch

from megatron_cg.backends.base import Backend, CaptureRequest, same_generators
from megatron_cg.capture.guarded_capture import GuardedCapture, clear_frames
from megatron_cg.consensus.decision import AgreementError, Kind, Vote, digest
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.consensus.process_exit import clear_exit, exit_without_waiting
from megatron_cg.errors import (
    CaptureError,
    EarlierWorkError,
    MegatronCGError,
    NotRestoredError,
    PhaseError,
    say,
)
from megatron_cg.extensions import install_fast_path
from megatron_cg.fsdp.roles import OutOfStepError
from megatron_cg.fsdp.sharding import Sharding
from megatron_cg.replay.guarded_graph import GuardedGraph
from megatron_cg.replay.mismatch_policy import Counters, MismatchPolicy, ReplayPolicy
from megatron_cg.replay.unit import Unit
from megatron_cg.restore import Restores
from megatron_cg.telemetry import CaptureReport, graphs_deleted
from megatron_cg.upstream.patch import set_attribute

if TYPE_CHECKING:
    from megatron_cg.fastpath.install_parts import FastPath
    from megatron_cg.integrations.repeated_step import StepState

logger = logging.getLogger(__name__)
_SESSIONS: "WeakKeyDictionary[Session, None]" = WeakKeyDictionary()
"""Sessions with graphs, the oldest first. A session lives as long as its model, which holds it: the
layers replay even if nobody else does. So a model that is dropped takes its graphs along."""
_GO_ON = "{flag:--cg-on-failure eager}"
_captures = count(1)
"""For the log alone: ranks may not capture the same models."""


class Phase(Enum):
    """The phase of a session: EAGER, CAPTURING, then REPLAYING, or EAGER again after a failure."""

    EAGER = "eager"
    CAPTURING = "capturing"
    REPLAYING = "replaying"
    CLOSED = "closed"


class Session:
    """The graphs of one model, whose ``units`` are in the order of their forward passes.

    ``run_remaining_hooks`` says whether a capture that fails on this rank still runs the hooks that
    other ranks wait for; see ``fsdp/roles.py``. ``fast_path`` is equal on all ranks; ``optimizers``
    are those of the model's parameters, for it.
    """

    def __init__(
        self,
        sharding: Sharding,
        units: Sequence[Unit],
        backend: Backend,
        agreement: Agreement,
        *,
        run_remaining_hooks: bool = False,
        policy: ReplayPolicy | None = None,
        fast_path: bool = True,
        optimizers: Sequence[Any] = (),
    ) -> None:
        self.sharding, self.units = sharding, tuple(units)
        self._backend = backend
        self._agreement, self._run_remaining_hooks = agreement, run_remaining_hooks
        self._use_fast_path, self._optimizers = fast_path, tuple(optimizers)
        self.fast_path: FastPath | None = None
        self.step_state: StepState | None = None
        """What a step may change, if it is saved in each; until the graphs are deleted."""
        self._undo: ExitStack = Restores()
        self._capture: GuardedCapture | None = None
        self.phase = Phase.EAGER
        self.counters = Counters()
        self.mismatches = MismatchPolicy(
            policy or ReplayPolicy(),
            self.counters,
            agreement.on_any_rank,
            units=self.units,
            noted=agreement.noted,
        )

    @property
    def digest(self) -> int:
        """A number for the graphs and the choice of the fast path; equal where both are equal."""
        graphs = (f"{unit.name}: {len(unit.graphed)} modules" for unit in self.units)
        return digest([*graphs, f"fast path: {self._use_fast_path}"])

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The transaction in which the caller captures the units and sets their graphs.

        The body calls :meth:`capture` and sets ``layer.cuda_graphs`` of every unit. If it raises,
        all is restored, for another try.

        Raises PhaseError if there are graphs already, EarlierWorkError if the GPU was in an error
        state, and HookError if a hook cannot be carried over.
        """
        self._require(Phase.EAGER)
        self._require_no_other_graphs()
        self._wait_for_earlier_work()
        report = CaptureReport(self.units)
        whole = False
        try:
            self.phase = Phase.CAPTURING
            self._capture = GuardedCapture(
                self.sharding, self.units, self._backend, self.mismatches
            )
            with self._capture.transaction() as lasting:
                try:
                    yield
                except Exception:  # See Note [Where ranks vote on a capture].
                    if self._run_remaining_hooks and self._agreement.awaits_start:
                        self._agreement.report_failure()
                    raise
                self._capture.attach(lasting)
                self._undo, whole = lasting.pop_all(), True
            # Not earlier: the fast path needs FSDP's hooks, which are only now restored.
            self._install_fast_path()
            self.mismatches.conditions.before_pass = same_generators()
            # A unit that holds collectives on one rank does on all.
            found = self._agreement.confirm(g.name for g in self._graphs() if g.collectives)
            for graph in self._graphs():
                graph.collectives = graph.name in found
        except BaseException as error:
            self.phase = Phase.EAGER
            with ExitStack() as ending:  # The vote comes last, whatever fails before it.
                ending.push(partial(self._share_failure, error, whole))
                ending.callback(report.ended, error=error)
                ending.callback(self._undo.close)
            raise
        for unit in self.units:
            self._undo.callback(set_attribute(unit.layer, "_megatron_cg_session", self))
        # A graph must not be destroyed while it replays, also if nobody closes its session.
        self._wait_on_drop = finalize(self, self._backend.synchronize)
        self._wait_on_drop.atexit = False
        _SESSIONS[self] = None
        suffix = f" of capture {next(_captures)} ({type(self.sharding.network).__name__})"
        self.mismatches.suffix = suffix if len(_SESSIONS) > 1 else ""
        self.counters.captured += len(self._graphs())
        self.phase = Phase.REPLAYING
        with ExitStack() as failed:
            failed.callback(self.close)
            report.ended(self.counters.captured, self.fast_path)
            failed.pop_all()

    def capture(self, request: CaptureRequest) -> tuple[GuardedGraph, ...]:
        """Capture the units by the backend; returns a guarded graph for each.

        The callables are the units' layers, in order. Raises CaptureError, also if another rank
        cannot capture the same, and OutOfStepError if this rank leaves others waiting.
        """
        self._require(Phase.CAPTURING)
        assert self._capture is not None
        if [id(layer) for layer in request.callables] != [id(unit.layer) for unit in self.units]:
            raise PhaseError("the layers to be captured are not this session's units, in order")

        vote = Vote(size=request.args[0][0].numel(), graphs=self.digest)
        begin = partial(self._agreement.ready, vote)
        return self._capture.run(
            request, begin=begin, run_remaining_hooks=self._run_remaining_hooks
        )

    def _install_fast_path(self) -> None:
        if not self._use_fast_path:
            return
        graphed = {m for unit in self.units for top in unit.graphed for m in top.modules()}
        replays = [graph.replay_function for graph in self._graphs()]
        self.fast_path = install_fast_path(
            self.sharding, self._backend, self._optimizers, graphed, replays
        )
        if self.fast_path is not None:
            self._undo.callback(self.fast_path.close)
            self.mismatches.conditions.flush_prefetch = self.fast_path.flush_prefetch

    def _share_failure(self, error: BaseException, whole: bool, *undoing: Any) -> None:
        """See Note [Where ranks vote on a capture]. ``undoing`` is what undoing has raised."""
        error = undoing[1] or error
        is_told = not isinstance(error, Exception) or isinstance(
            error, OutOfStepError | AgreementError
        )
        if not is_told and (self._run_remaining_hooks or whole):
            with nullcontext() if self._run_remaining_hooks else suppress(CaptureError):
                self._agreement.report_failure(ends=isinstance(error, NotRestoredError))

    @property
    def holds_collectives(self) -> bool:
        """Whether a graph does, on any rank."""
        return any(graph.collectives for graph in self._graphs())

    def on_close(self, undo: Callable[[], None]) -> None:
        """Make :meth:`close` run ``undo`` too, before it undoes earlier changes."""
        self._require(Phase.REPLAYING)
        self._undo.callback(undo)

    def close(self) -> None:
        """Release the graphs and undo all changes of capture in reverse. Safe to run twice.

        The host waits for the GPU first: a graph must not be destroyed while it replays.
        """
        if self.phase is Phase.CAPTURING:
            raise PhaseError("a session cannot be closed from inside its own capture")
        replaying, self.phase = self.phase is Phase.REPLAYING, Phase.CLOSED
        if not replaying:
            return
        del _SESSIONS[self]
        self._wait_on_drop.detach()
        with self._undo, ExitStack() as release:
            for graph in self._graphs():
                release.callback(graph.reset)
            # Last in, first out: the wait runs first. If it raises, graphs are still released.
            release.callback(self._backend.synchronize)

    def _graphs(self) -> list[Any]:
        return [graph for unit in self.units for graph in getattr(unit.layer, "cuda_graphs", ())]

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise PhaseError(
                f"this session is {self.phase.value}, and has to be {phase.value} for that. To "
                "capture again, delete its graphs and open a new session"
            )

    def _require_no_other_graphs(self) -> None:
        taken = [unit.name for unit in self.units if getattr(unit.layer, "cuda_graphs", ())]
        if taken:
            raise PhaseError(
                f"{', '.join(taken)} has graphs of another session. Delete those first, or capture "
                "each layer in one session only"
            )

    def _wait_for_earlier_work(self) -> None:
        """Wait for the GPU, so that an earlier error is not reported as an error of capture."""
        try:
            self._backend.synchronize()
        except Exception as error:
            raise EarlierWorkError(
                f"work queued before capture failed: {type(error).__name__}: {error}. Capture had "
                "not begun. To see which operation it was, run with CUDA_LAUNCH_BLOCKING=1"
            ) from error


def open_sessions() -> int:
    return len(_SESSIONS)


def close_all_sessions() -> None:
    """Close every session that has graphs, also when closing one of them raises."""
    with ExitStack() as stack:
        for session in list(_SESSIONS):
            stack.callback(session.close)


class GraphController:
    """Captures and deletes one model's graphs; all ranks do so together.

    ``eager_on_failure`` says whether training continues eagerly after a failed capture.
    """

    def __init__(
        self,
        agreement: Agreement,
        capture: Callable[[], Session],
        *,
        eager_on_failure: bool = False,
    ) -> None:
        self._agreement = agreement
        self._capture = capture
        self._eager_on_failure = eager_on_failure
        self._earlier = Counters()
        self.session: Session | None = None
        """The current graphs; None before capture and after deletion."""
        self.gave_up = False
        """Whether this model trains eagerly for the rest of the run."""
        self.awaits_capture = True
        """Whether a capture is to come: not after one, after giving up, or after closing."""

    @property
    def counters(self) -> Counters:
        return self._earlier if self.session is None else self._earlier + self.session.counters

    def capture(self) -> None:
        """Capture on all ranks. If capture fails and training continues, ``gave_up`` is True.

        If not, raises CaptureError, or the original error if it is one of this package's.
        """
        if self.session is not None:
            raise PhaseError("graphs exist: call delete_cuda_graphs() before another capture")
        self._agreement.begin_capture()
        try:
            self.session = self._capture()
            self.awaits_capture = False
        except Exception as error:
            self._fail(error)

    def delete(self) -> None:
        """Release the graphs, if there are any, on all ranks: they vote on it.

        Without graphs a rank may issue its collectives in another order than those that replay.
        """
        if self.session is not None and self.session.phase is Phase.REPLAYING:
            self._agreement.agree(Kind.DELETION, Vote(graphs=self.session.digest))
        self.release()

    def release(self) -> None:
        """Release this rank's graphs, and undo all that capture changed. No vote."""
        session, self.session = self.session, None
        if session is None:
            return
        self._earlier += session.counters
        with closing(session):
            graphs_deleted(session.counters, self.counters)

    def begin_step(self) -> None:
        clear_exit()
        if self.session is not None:
            self.session.mismatches.begin_step()

    def close(self) -> None:
        """Stop voting and release the votes' process group; call it before other groups go.

        Safe to run twice. The graphs stay, and no capture follows.
        """
        self.awaits_capture = False
        clear_exit()
        self._agreement.close()

    def _fail(self, error: Exception) -> None:
        failure = error
        if not isinstance(error, MegatronCGError):
            advice = "" if self._eager_on_failure else f" To train without graphs: {say(_GO_ON)}."
            failure = CaptureError(f"capture failed with {type(error).__name__}: {error}.{advice}")
        # The traceback's frames hold incomplete graphs, and training needs their memory.
        clear_frames(error)
        fatal = OutOfStepError | EarlierWorkError | NotRestoredError
        if not self._eager_on_failure or isinstance(error, fatal):
            # Without a vote: the launcher ends the other ranks.
            if isinstance(error, OutOfStepError):
                exit_without_waiting()
            raise failure from (error if failure is not error else error.__cause__)
        self._agreement.report_failure()
        as_before = "Model, hooks, gradients, RNG and FP8 state are as before."
        logger.error("%s %s Training goes on eagerly (%s).", failure, as_before, say(_GO_ON))
        self.gave_up, self.awaits_capture = True, False
        gc.collect()
        torch.cuda.empty_cache()
