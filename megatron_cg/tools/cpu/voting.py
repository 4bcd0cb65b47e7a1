"""A trainer with graphs in which ranks decide together, as Megatron's ranks do with the helper."""

from __future__ import annotations

from typing import Any

from megatron_cg.backends.base import Backend
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.session import Session
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu.train import Trainer
from megatron_cg.tools.cpu.training_plan import TrainingPlan


class VotingTrainer(Trainer):
    """Captures when :meth:`start` is called, and again when any rank requests it.

    Args:
        plan: the training plan.
        policy: what happens when a graph must not be replayed.
        backend: the capture backend.
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
        self.controller = GraphController(self.agreement, self._capture, self._static_inputs.forget)

    def start(self) -> None:
        """Capture, on all ranks. Raises as :meth:`GraphController.capture` does."""
        self.controller.capture()

    def step(self) -> tuple[float, float]:
        """As :meth:`Trainer.step`; applies the ranks' decision before it and votes after it."""
        self.controller.before_step()
        numbers = super().step()
        self.controller.after_step()
        return numbers

    def stop(self) -> None:
        """Delete the graphs, if there are any; keep their counts."""
        self.controller.delete()

    def close(self) -> None:
        """Stop voting and delete the graphs. Safe to call twice."""
        self.controller.close()
        self.stop()

    def _capture(self) -> Session:
        session = self.capture(self._backend, self.agreement, policy=self._policy)
        session.on_close(self._forget_session)
        return session

    def _forget_session(self) -> None:
        self.session = None

    def report(self) -> dict[str, Any]:
        """All counts so far, including those of the current session."""
        return self.controller.counters.as_dict()
