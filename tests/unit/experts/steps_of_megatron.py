"""Steps by Megatron's own schedule on the CPU, and by its functions for gradients."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

from megatron_cg.integrations.megatron.steps import repeat_if_needed
from megatron_cg.tape.train import Trainer
from megatron_cg.tape.training_plan import TrainingPlan


class MegatronTrainer(Trainer):
    """A trainer whose steps run as in ``train_step`` of ``megatron.training``."""

    def __init__(self, plan: TrainingPlan) -> None:
        super().__init__(plan)
        config: Any = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.model.no_sync
        config.timers = None
        self.config = config
        self.optimizer = SimpleNamespace(zero_grad=self._optimizer.zero_grad, step=self._update)
        self.steps = 0
        self.norm = 0.0
        self.forward_passes = self.trained = self.read = 0
        self._batches = self._counted(self._batches)
        self.before: Callable[[int, int], None] = lambda step, microbatch: None
        """Runs before each forward pass of training."""

    def _step(self) -> tuple[float, float]:
        while get_rerun_state_machine().should_run_forward_backward(self._batches):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=self._batches,
                model=[self.model],
                num_microbatches=self.plan.microbatches,
                seq_length=self.plan.model.sequence_length,
                micro_batch_size=self.plan.micro_batch_size,
                forward_only=False,
            )
        self.optimizer.step()
        self.steps += 1
        return sum(float(one["lm loss"][0]) for one in losses), self.norm

    def _update(self) -> None:
        self.norm = self._gradient_norm()
        self._optimizer.step(sync_grad_before_optimizer_step=False)

    def _forward_step(self, batches: Iterator[Any], model: Any) -> Any:
        if model.training:
            self.before(self.steps, self.trained % self.plan.microbatches)
            self.trained += 1
        self.forward_passes += 1
        tokens, labels = next(batches)
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        mask = ~torch.tril(torch.ones(length, length, dtype=torch.bool)).reshape(1, 1, length, -1)
        # As a forward function of somebody's own may draw.
        scale = 1.0 + (random.random() + numpy.random.rand() + float(torch.rand(()))) / 8

        def loss_of(output: torch.Tensor) -> Any:
            total = output.float().sum() * scale
            machine = get_rerun_state_machine()
            machine.validate_result(
                total.detach(),
                rejection_func=partial(
                    machine.is_unexpectedly_large, threshold=1e9, context="loss"
                ),
                message="loss",
                fatal=False,
            )
            count = torch.tensor(output.numel(), dtype=torch.int)
            return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

        return model(tokens, positions, mask, labels=labels), loss_of

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count in ``read`` how many batches were read from the data, those read again left out."""
        for batch in batches:
            self.read += 1
            yield batch

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            output, _ = self._forward_step(self._batches, self.model)
        self.model.train()
        return float(output.sum())


class _Graphs:
    """Stands for the controller of a trainer's graphs, and for its steps."""

    def __init__(self, trainer: MegatronTrainer) -> None:
        self._trainer, self.controller = trainer, self

    @property
    def session(self) -> Any:
        return self._trainer.session

    @property
    def number(self) -> int:
        return self._trainer.steps + 1


def repeats(trainer: MegatronTrainer, *, verifies: bool = False) -> Callable[[], None]:
    graphs: Any = _Graphs(trainer)
    return repeat_if_needed([trainer.model], [trainer.optimizer], graphs, verifies=verifies)


@contextmanager
def trainer_of(plan: TrainingPlan) -> Iterator[MegatronTrainer]:
    """A trainer, with Megatron's state machine of reruns."""
    destroy_moe_metrics_tracker()
    rerun_state_machine.initialize_rerun_state_machine(
        mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS
    )
    with ExitStack() as undo:
        undo.callback(rerun_state_machine.destroy_rerun_state_machine)
        trainer = MegatronTrainer(plan)
        batches: Any = rerun_state_machine.RerunDataIterator(trainer._batches)
        trainer._batches = batches
        undo.callback(parallel_state.destroy_model_parallel)
        yield trainer
