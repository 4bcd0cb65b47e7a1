"""Capture and deletion of one model's graphs; its users define how to capture."""

import gc
import logging
from collections.abc import Callable

import torch

from megatron_cg.capture.guarded_capture import clear_frames
from megatron_cg.capture.hook_order import OutOfStepError
from megatron_cg.capture.session import Phase, Session
from megatron_cg.consensus.decision import Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.consensus.process_exit import exit_without_waiting, goes_on
from megatron_cg.errors import (
    CaptureError,
    EarlierWorkError,
    MegatronCGError,
    NotRestoredError,
    PhaseError,
)
from megatron_cg.events import GraphsDeleted, emit
from megatron_cg.replay.counters import Counters

logger = logging.getLogger(__name__)


class GraphController:
    """Captures and deletes one model's graphs; all ranks do so together.

    ``goes_on`` says whether training continues eagerly after a failed capture, ``option`` is what a
    user types for that, and ``clean_up`` is called then.
    """

    def __init__(
        self,
        agreement: Agreement,
        capture: Callable[[], Session],
        *,
        goes_on: bool = False,
        option: str = "",
        clean_up: Callable[[], None] | None = None,
    ) -> None:
        self._agreement = agreement
        self._capture = capture
        self._goes_on, self._option, self._clean_up = goes_on, option, clean_up
        self._earlier = Counters()
        self.session: Session | None = None
        """The current graphs; None before capture and after deletion."""
        self.gave_up = False
        """Whether this model trains eagerly for the rest of the run."""
        self._captured = self._closed = False

    @property
    def counters(self) -> Counters:
        total = Counters()
        total.add(self._earlier)
        if self.session is not None:
            total.add(self.session.counters)
        return total

    @property
    def awaits_capture(self) -> bool:
        return not self._captured and not self.gave_up and not self._closed

    def capture(self) -> None:
        """Capture on all ranks. If capture fails and training continues, ``gave_up`` is True.

        Raises:
            PhaseError: there are graphs.
            CaptureError: capture failed, and training does not continue without graphs.
            MegatronCGError: the original error, if it is one of this package's.
        """
        if self.session is not None:
            raise PhaseError("graphs exist: call delete_cuda_graphs() before another capture")
        self._agreement.begin_capture()
        try:
            self.session = self._capture()
            self._captured = True
        except Exception as error:
            self._fail(error)

    def delete(self) -> None:
        """Release the graphs, if there are any, on all ranks: they vote on it.

        Without graphs a rank may issue its collectives in another order than those that replay.
        Raises AgreementError: not all ranks make this call; this one has to end.
        """
        if self.session is not None and self.session.phase is Phase.REPLAYING:
            self._agreement.agree(Kind.DELETION, Vote(graphs=self.session.digest))
        self.release()

    def release(self) -> None:
        """Release this rank's graphs, if there are any, and undo all that capture changed.

        No vote: training is over.
        """
        session, self.session = self.session, None
        if session is None:
            return
        self._earlier.add(session.counters)
        try:
            emit(GraphsDeleted(session.counters, self.counters))
        finally:
            session.close()

    def begin_step(self) -> None:
        goes_on()
        if self.session is not None:
            self.session.mismatches.begin_step()

    def close(self) -> None:
        """Stop voting and release the votes' process group; call it before other groups go.

        Safe to run twice. The graphs stay, and no capture follows.
        """
        self._closed = True
        goes_on()
        self._agreement.close()

    def _fail(self, error: Exception) -> None:
        failure = self._as_capture_error(error)
        # The traceback's frames hold incomplete graphs, and training needs their memory.
        clear_frames(error)
        fatal = OutOfStepError | EarlierWorkError | NotRestoredError
        if not self._goes_on or isinstance(error, fatal):
            # Without a vote: the launcher ends the other ranks.
            if isinstance(error, OutOfStepError):
                exit_without_waiting()
            raise failure from (error if failure is not error else error.__cause__)
        self._agreement.report_failure()
        as_before = "Model, hooks, gradients, RNG and FP8 state are as before."
        logger.error("%s %s Training goes on eagerly (%s).", failure, as_before, self._option)
        self.gave_up = True
        if self._clean_up is not None:
            self._clean_up()
        gc.collect()
        torch.cuda.empty_cache()

    def _as_capture_error(self, error: Exception) -> MegatronCGError:
        if isinstance(error, MegatronCGError):
            return error
        has_advice = self._option and not self._goes_on
        advice = f" To train without graphs: {self._option}." if has_advice else ""
        return CaptureError(f"capture failed with {type(error).__name__}: {error}.{advice}")
