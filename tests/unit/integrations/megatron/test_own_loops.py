"""``enable()`` in a user's training loop: Megatron's helper is ours, and steps are reported to it.

Whole trainings of this kind are in ``tests/unit/backends/tape/test_own_loop.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

import megatron_cg
from megatron_cg.capture.session import open_sessions
from megatron_cg.errors import ConfigurationError
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.upstream.patch import applied
from tests.unit.counted import expect
from tests.unit.one_mask import OneMask

LENGTH, BATCH, LAYERS = 16, 2, 2


@pytest.fixture
def trainer(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from megatron.core import num_microbatches_calculator as calculator

    from megatron_cg.integrations.megatron.own_loops import LoopHelper
    from megatron_cg.tools.cpu.train import Trainer
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan

    monkeypatch.setattr(LoopHelper, "make_backend", OneMask)
    calculator.init_num_microbatches_calculator(0, None, BATCH, BATCH, 1)
    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"), sequence_length=LENGTH)
    megatron_cg.enable()
    yield Trainer(TrainingPlan(model=model, micro_batch_size=BATCH))
    megatron_cg.disable()
    calculator.destroy_num_microbatches_calculator()


def helper_for(trainer: Any) -> Any:
    return TECudaGraphHelper(
        model=[trainer.model],
        config=trainer.model.config,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        optimizers=[trainer._optimizer],
    )


def test_steps_are_followed_by_the_optimizer(trainer: Any) -> None:
    helper = helper_for(trainer)
    trainer.step()
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks()
    session = helper.session
    for _ in range(3):
        trainer.step()
    expect(session.counters, captured=LAYERS, replayed=3 * LAYERS, eager=0, mismatched=0)
    # Four steps, and the two votes of the capture.
    assert helper.counted()[1].votes == 4 + 2
    helper.delete_cuda_graphs()
    trainer.step()
    expect(session.counters, replayed=3 * LAYERS)


def test_a_wish_to_capture_again_is_done_between_two_steps(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.integrations.megatron.own_loops import LoopHelper

    monkeypatch.setattr(LoopHelper, "policy", ReplayPolicy("recapture"))
    helper = helper_for(trainer)
    trainer.step()
    helper.create_cudagraphs()
    first = helper.session
    first.mismatches.wants_recapture = True
    trainer.step()
    assert helper.session is first
    trainer.step()
    assert helper.session is not first
    trainer.step()
    expect(helper.session.counters, captured=LAYERS, replayed=LAYERS, recaptured=1, eager=0)
    helper.delete_cuda_graphs()


def test_a_broken_rule_ends_the_run_before_anything_is_made(trainer: Any) -> None:
    config = trainer.model.config
    config.gradient_accumulation_fusion, config.transformer_impl = True, "local"
    step = trainer._optimizer.step
    with pytest.raises(ConfigurationError, match="gradient accumulation fusion"):
        helper_for(trainer)
    assert trainer._optimizer.step == step


def test_a_helper_that_cannot_follow_steps_leaves_nothing_changed(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.integrations.megatron import own_loops

    def broken(*_args: Any) -> Any:
        raise LookupError

    before = applied()
    with monkeypatch.context() as patch, pytest.raises(LookupError):
        patch.setattr(own_loops, "run_after", broken)
        helper_for(trainer)
    assert applied() == before


def test_disable_leaves_nothing_on_the_optimizer_or_the_class(trainer: Any) -> None:
    init = vars(TECudaGraphHelper)["__init__"]
    step = trainer._optimizer.step
    helper = helper_for(trainer)
    helper.create_cudagraphs()
    assert trainer._optimizer.step != step and open_sessions() == 1
    megatron_cg.disable()
    assert trainer._optimizer.step == step and open_sessions() == 0
    assert vars(TECudaGraphHelper)["__init__"] is init.__wrapped__
    trainer.step()


def test_a_helper_that_nobody_holds_votes_until_the_end(trainer: Any) -> None:
    def capture() -> tuple[Any, Any]:
        helper = helper_for(trainer)
        trainer.step()
        helper.create_cudagraphs()
        return helper._agreement, helper.session

    agreement, session = capture()
    gc.collect()
    before = agreement.time.votes
    trainer.step()
    assert agreement.time.votes == before + 1
    expect(session.counters, replayed=LAYERS)
    megatron_cg.disable()
    trainer.step()
    assert agreement.time.votes == before + 1


def test_a_second_helper_of_a_model_replaces_the_first(trainer: Any) -> None:
    step = trainer._optimizer.step
    first = helper_for(trainer)
    trainer.step()
    first.create_cudagraphs()
    second = helper_for(trainer)
    assert first.session is None and open_sessions() == 0
    before = first.counted()[1].votes
    trainer.step()
    second.create_cudagraphs()
    trainer.step()
    assert first.counted()[1].votes == before
    expect(second.session.counters, captured=LAYERS, replayed=LAYERS, eager=0)
    second.close()
    second.close()
    assert open_sessions() == 0 and trainer._optimizer.step == step


def test_the_rules_are_asked_with_the_settings_that_were_given(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.arguments.schema import GraphArguments
    from megatron_cg.integrations.megatron.own_loops import settings_for_own_loops

    undo = settings_for_own_loops({"given": GraphArguments(cg_layers=("no_such_scope:0",))})
    with pytest.raises(ConfigurationError, match="no_such_scope"):
        helper_for(trainer)
    undo()
    helper_for(trainer)


def test_flags_of_the_command_line_hold_here_too() -> None:
    from megatron_cg.integrations.megatron.own_loops import LoopHelper, settings_for_own_loops

    undo = settings_for_own_loops({"on_failure": "eager"})
    assert LoopHelper.on_failure == "eager"
    undo()
    assert LoopHelper.on_failure == "error" and "on_failure" not in vars(LoopHelper)


def test_a_model_without_fsdp_keeps_megatrons_helper(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(TECudaGraphHelper, "_discover_layers", lambda self: None)
    plain = trainer.model.module.module
    helper = TECudaGraphHelper([plain], trainer.model.config, LENGTH, BATCH)
    assert type(helper) is TECudaGraphHelper
    monkeypatch.setattr(trainer.model.config, "recompute_granularity", "full")
    with pytest.raises(ConfigurationError, match="not under Megatron-FSDP"):
        TECudaGraphHelper([plain], trainer.model.config, LENGTH, BATCH)


def test_a_class_that_is_made_of_megatrons_is_left_alone(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)

    class Other(TECudaGraphHelper):  # type: ignore[misc]
        pass

    made = Other([trainer.model], trainer.model.config, LENGTH, BATCH)
    assert type(made) is Other and SimpleNamespace(**vars(made)).micro_batch_size == BATCH
