"""A trainer with graphs in which ranks decide together, as Megatron's ranks do with the helper."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_cg.backends.base import Backend
from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.capture.controller import GraphController
from megatron_cg.capture.session import Session
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute
from megatron_cg.moe.install import use_device_counts
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.telemetry.record import Recorder, recording
from megatron_cg.tools.cpu.grouped_linear import in_place_of_te
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


def train(plan: TrainingPlan, directory: Path, backend: Backend | None = None) -> None:
    """Run ``plan`` in this process and write its record to ``directory/rank<N>.jsonl``.

    ``backend`` captures its graphs; the tape if None.

    The record's file is written also when training fails, with the error's name and text.
    """
    recorder = Recorder(directory)
    recorder.begin(plan.setup())
    relaxed = ExitStack()
    try:
        relaxed.callback(allow_full_recompute())
        if plan.device_counts:
            relaxed.enter_context(in_place_of_te())
            relaxed.callback(use_device_counts())
        trainer = VotingTrainer(plan, backend=backend)
        with recording(recorder), closing(trainer):
            for number in range(plan.steps):
                if plan.graphs and number == plan.warmup_steps:
                    trainer.start()
                start = time.perf_counter()
                loss, norm = trainer.step()
                losses = {"lm loss": torch.tensor(loss, dtype=torch.float64)}
                recorder.add_step(losses, norm, False, start)
            if plan.graphs:
                recorder.note("graphs", trainer.report())
                recorder.note("agreement", trainer.agreement.time.as_dict())
            recorder.finish([trainer.model])
    except BaseException as error:
        recorder.fail(error)
        raise
    finally:
        relaxed.close()
        parallel_state.destroy_model_parallel()
