"""A trainer with graphs whose ranks decide together, as Megatron's do through the helper."""

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
        self.controller = GraphController(self.agreement, self._capture, self._static_inputs.forget)

    def start(self) -> None:
        """Capture; on all ranks. Raises as :meth:`GraphController.capture`."""
        self.controller.capture()

    def step(self) -> tuple[float, float]:
        """As :meth:`Trainer.step`, with the ranks' decisions around it."""
        self.controller.before_step()
        numbers = super().step()
        self.controller.after_step()
        return numbers

    def stop(self) -> None:
        """Delete the graphs, if there are any; their counts are kept."""
        self.controller.delete()

    def close(self) -> None:
        """Vote no more and delete the graphs. Safe to run twice."""
        self.controller.close()
        self.stop()

    def _capture(self) -> Session:
        session = self.capture(self._backend, self.agreement, policy=self._policy)
        session.on_close(self._forget_session)
        return session

    def _forget_session(self) -> None:
        self.session = None

    def report(self) -> dict[str, Any]:
        """All counts so far, those of the session that runs included."""
        return self.controller.counters.as_dict()
