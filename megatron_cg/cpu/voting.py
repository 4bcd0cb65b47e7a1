"""A trainer with graphs whose ranks decide together, as Megatron's do through the helper."""

from __future__ import annotations

from typing import Any

from megatron_cg.backends.base import Backend
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.consensus.boundary import Boundary
from megatron_cg.consensus.decision import Decision, Level, Verdict
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.cpu.plan import TrainingPlan
from megatron_cg.cpu.train import Trainer
from megatron_cg.replay.counters import Counters
from megatron_cg.replay.guard.inputs import STATIC_INPUT
from megatron_cg.replay.mismatch_policy import ReplayPolicy


class VotingTrainer(Trainer):
    """Captures once :meth:`start` is called, and again when any rank asks for it.

    Args:
        plan: what is trained.
        policy: what follows when a graph must not be replayed.
        backend: what captures.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        policy: ReplayPolicy | None = None,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(plan)
        self._policy, self._backend = policy, backend or TapeBackend()
        self.agreement = Agreement()
        self.counters = Counters()
        """Of all sessions that were closed."""
        self._boundary = Boundary(self.agreement, self._verdict, self._again, self._give_up)

    def start(self) -> None:
        """Capture; on all ranks. Raises what :meth:`Trainer.capture` raises."""
        self.capture(self._backend, self.agreement, policy=self._policy)

    def step(self) -> tuple[float, float]:
        """As :meth:`Trainer.step`, with the ranks' decisions around it."""
        self._boundary.before_step()
        numbers = super().step()
        self._boundary.after_step()
        return numbers

    def stop(self) -> None:
        """Close the session, if there is one; its counts are kept."""
        if self.session is not None:
            self.counters.add(self.session.counters)
            self.session.close()
            self.session = None

    def close(self) -> None:
        """Vote no more and close the session. Safe to run twice."""
        self._boundary.close()
        self.stop()

    def _verdict(self) -> Verdict:
        if self.session is None:
            return Verdict()
        wants = Level.RECAPTURE if self.session.watch.wants_recapture else Level.KEEP
        return Verdict(wants, graphs=self.session.digest)

    def _again(self) -> None:
        if self.session is not None and self.session.watch.saw(STATIC_INPUT):
            self._static_inputs.forget()
        self.stop()
        self.agreement.begin_capture()
        self.start()
        if self.session is not None:
            self.session.watch.captured_again = True
            self.session.counters.recaptured += 1

    def _give_up(self, _decision: Decision) -> None:
        self.stop()

    def report(self) -> dict[str, Any]:
        """All counts so far, those of the session that runs included."""
        total = Counters()
        total.add(self.counters)
        if self.session is not None:
            total.add(self.session.counters)
        return total.as_dict()
