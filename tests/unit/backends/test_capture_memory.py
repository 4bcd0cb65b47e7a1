"""Memory that graphs do not need is freed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_cg.fsdp.sharding import let_gradients_go
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.trainers import helper_of, layers_of, microbatch_of, new_trainer

LENGTH, STEPS = 16, 3


def make_trainer(**fsdp_options: Any) -> Any:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    model = CpuModelConfig(layers=2, graph_modules=("attn", "mlp"), fsdp_options=fsdp_options)
    return new_trainer(model, graphs=True)


def copied(trainer: Any) -> int:
    """Bytes of the optimizer's copies of gradients, which FSDP's own table holds too."""
    copies = trainer._fsdp.param_and_grad_buffer.dist_main_grad.values()
    return sum(copy._local_tensor.nbytes for copy in copies if copy._local_tensor is not None)


def cast_bytes(trainer: Any) -> int:
    store = trainer._fsdp.param_and_grad_buffer
    return sum(4 * int(group.main_grad_buffer.data_size) for group in store.parameter_groups)


def test_gradients_outlive_their_step_in_megatrons_graph_mode_and_not_in_ours(
    one_rank: None,
) -> None:
    trainer = make_trainer(megatron_fsdp_cuda_graph_mode=True)  # as Megatron sets it
    undo = let_gradients_go(trainer._fsdp)
    trainer.step()
    assert copied(trainer) == cast_bytes(trainer)
    trainer._fsdp.zero_grad_buffer()
    assert copied(trainer) == 0
    undo()
    trainer.step()
    trainer._fsdp.zero_grad_buffer()
    for _, parameter in trainer._fsdp.param_and_grad_buffer.optimizer_named_parameters:
        parameter.grad = None
    assert copied(trainer) == cast_bytes(trainer)  # Megatron-FSDP holds them still.
    undo = let_gradients_go(trainer._fsdp)
    trainer._fsdp.zero_grad_buffer()
    undo()
    assert copied(trainer) == 0
    assert trainer._fsdp.param_and_grad_buffer.ddp_config.megatron_fsdp_cuda_graph_mode is True


@pytest.fixture
def unmasked(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers pass no mask, as Megatron's data loader where it makes none, or their own."""
    from megatron_cg.tape.train import Trainer

    def forward(self: Any) -> torch.Tensor:
        tokens, labels = next(self._batches)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        losses: torch.Tensor = self.model(tokens, positions, vars(self).get("mask"), labels=labels)
        return losses.float()

    monkeypatch.setattr(Trainer, "_forward", forward)
    with microbatch_of(2):
        yield


def captured(trainer: Any, leave_out: bool) -> tuple[Any, Callable[[], None]]:
    from megatron_cg.integrations.megatron.megatron_unit import ObservedInputs, without_unused_masks

    inputs = ObservedInputs(layers_of(trainer))
    stop = inputs.observe_step()
    trainer.first = trainer.step()
    stop()
    undo = without_unused_masks(layers_of(trainer), inputs) if leave_out else lambda: None
    helper = helper_of(trainer, TapeBackend())
    helper.capture()
    return helper, undo


@pytest.mark.parametrize("leave_out", [True, False])
def test_a_layer_without_a_mask_trains_as_eagerly_whether_its_graph_has_one_or_not(
    unmasked: None, leave_out: bool
) -> None:
    eager = make_trainer()
    expected = [eager.step() for _ in range(1 + STEPS)]
    trainer = make_trainer()
    helper, undo = captured(trainer, leave_out)
    names = layers_of(trainer)[1].cuda_graphs[0].graph._recorded.kwarg_names
    assert ("attention_mask" in names) is not leave_out
    found = [trainer.first] + [trainer.step() for _ in range(STEPS)]
    # Megatron's zeros say "mask nothing" to an attention that reads its mask, as this one does.
    replayed, eagerly = (2 * STEPS, 0) if leave_out else (0, 2 * STEPS)
    expect(helper.session.counters, replayed=replayed, eager=eagerly)
    assert found == expected
    helper.controller.delete()
    undo()


def test_a_mask_that_comes_later_is_not_left_aside(unmasked: None) -> None:
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    eager = make_trainer()
    eager.step()
    eager.mask = mask
    expected = eager.step()
    trainer = make_trainer()
    helper, undo = captured(trainer, leave_out=True)
    trainer.mask = mask
    assert trainer.step() == expected
    expect(helper.session.counters, replayed=0, eager=2)
    helper.controller.delete()
    undo()
