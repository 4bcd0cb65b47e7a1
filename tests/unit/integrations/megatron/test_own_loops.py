"""``enable()`` in a user's training loop: Megatron's helper is ours, and steps are reported to it.

Whole trainings of this kind are in ``tests/unit/tape/test_own_loop.py``.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

import megatron_cg
from megatron_cg import GraphedLayers
from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.capture.session import open_sessions
from megatron_cg.consensus.decision import AgreementError, Kind
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ConfigurationError
from megatron_cg.experts.install import DeviceDispatcher
from megatron_cg.integrations.megatron import patches
from megatron_cg.integrations.megatron.helper import FsdpHelper
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.patch import applied
from tests.unit.counted import expect
from tests.unit.one_mask import OneMask
from tests.unit.trainers import microbatch_of, new_trainer

LENGTH, LAYERS = 16, 2


@pytest.fixture
def trainer(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("megatron_cg.integrations.megatron.patches.backend_of", lambda _: OneMask())
    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"))
    megatron_cg.enable(backend="tape")
    with microbatch_of(2):
        yield new_trainer(model)
        megatron_cg.disable()


def helper_for(trainer: Any) -> Any:
    return TECudaGraphHelper(
        model=[trainer.model],
        config=trainer.model.config,
        seq_length=LENGTH,
        micro_batch_size=2,
        optimizers=[trainer._optimizer],
    )


def enabled() -> Any:
    return patches._enabled


def ours() -> FsdpHelper:
    """The helper whose methods the last one of Megatron's has."""
    made: FsdpHelper = enabled().helpers[-1]
    return made


def test_steps_are_followed_by_the_optimizer(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = helper_for(trainer)
    trainer.step()
    helper.create_cudagraphs()
    helper.cuda_graph_set_manual_hooks()
    session: Any = ours().session
    for _ in range(3):
        trainer.step()
    expect(session.counters, captured=LAYERS, replayed=3 * LAYERS, eager=0, mismatched=0)
    voted: list[Any] = []
    monkeypatch.setattr(Agreement, "agree", lambda _self, kind, _vote: voted.append(kind))
    helper.delete_cuda_graphs()
    assert voted == [Kind.DELETION]  # All ranks delete their graphs, or none does.
    trainer.step()
    expect(session.counters, replayed=3 * LAYERS)


def test_a_broken_rule_ends_the_run_before_anything_is_made(trainer: Any) -> None:
    trainer.model.config.gradient_accumulation_fusion = True
    step = trainer._optimizer.step
    with pytest.raises(ConfigurationError, match=r"set \w+Config.gradient_accumulation_fusion=F"):
        helper_for(trainer)
    assert trainer._optimizer.step == step
    enabled().checked.append(trainer.model.config)  # as when Megatron-Bridge's run was checked
    helper_for(trainer)
    assert ours().helper.config is trainer.model.config


def test_ranks_meet_before_anything_is_made(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(_agreement: Agreement, settings: Any) -> None:
        raise AgreementError(f"{settings['call']} {settings['verify_interval']}")

    monkeypatch.setattr(Agreement, "require_same", differs)
    megatron_cg.enable(verify_interval=3)
    before = enabled().helpers[:], trainer._optimizer.step, applied()
    with pytest.raises(AgreementError, match=r"megatron_cg\.enable 3"):
        helper_for(trainer)
    assert (enabled().helpers, trainer._optimizer.step, applied()) == before


def test_settings_of_enable_hold_for_helpers_that_come_after(trainer: Any, tmp_path: Path) -> None:
    helper_for(trainer)
    first = ours().given
    megatron_cg.enable(verify_interval=2, layers="attn:0")
    megatron_cg.enable(on_failure="eager")
    helper_for(trainer)
    expected = GraphArguments(
        cg_verify_interval=2, cg_layers=("attn:0",), cg_on_failure="eager", cg_backend="tape"
    )
    assert (first, ours().given) == (GraphArguments(cg_backend="tape"), expected)
    with GraphedLayers(
        trainer.model, trainer._optimizer, seq_length=8, micro_batch_size=1, layers="mlp:0"
    ) as graphs:
        assert graphs._helper.given == replace(expected, cg_layers=("mlp:0",))
    megatron_cg.enable(moe_rows=1.25)
    with pytest.raises(
        ConfigurationError, match=r"\(moe_rows=1.25\) in a run whose graphs hold no"
    ):
        helper_for(trainer)
    megatron_cg.enable(record=tmp_path)
    with pytest.raises(ConfigurationError, match="record or report in a loop of your own"):
        helper_for(trainer)
    megatron_cg.disable()
    assert patches._enabled is None


def test_a_helper_that_nobody_holds_replays_until_the_end(trainer: Any) -> None:
    helper_for(trainer)
    trainer.step()
    ours().capture()
    gc.collect()
    session: Any = ours().session
    trainer.step()
    expect(session.counters, replayed=LAYERS)
    megatron_cg.disable()
    trainer.step()
    expect(session.counters, replayed=LAYERS)


def test_a_second_helper_of_a_model_replaces_the_first(trainer: Any) -> None:
    step = trainer._optimizer.step
    helper_for(trainer).create_cudagraphs()
    first = ours()
    helper_for(trainer)
    second: Any = ours()
    assert first.session is None and open_sessions() == 0
    trainer.step()
    second.capture()
    trainer.step()
    expect(second.session.counters, captured=LAYERS, replayed=LAYERS, eager=0)
    second.close()
    second.close()
    assert open_sessions() == 0 and trainer._optimizer.step == step


def test_the_loss_scale_can_be_set_after_a_capture_before_the_first_step(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexerLossAutoScaler,
    )
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    parallel_state.destroy_model_parallel()
    scalers: list[Any] = [MoEAuxLossAutoScaler, DSAIndexerLossAutoScaler]
    for scaler in scalers:
        monkeypatch.setattr(scaler, "main_loss_backward_scale", None)
    scopes = ("attn", "moe_router")
    trainer = new_trainer(CpuModelConfig(layers=LAYERS, experts=4, graph_modules=scopes))
    helper_for(trainer).create_cudagraphs()
    for scaler in scalers:
        made = scaler.main_loss_backward_scale
        scaler.set_loss_scale(torch.ones(1) / 2)
        assert made is scaler.main_loss_backward_scale and float(made) == 0.5
    trainer.step()
    expect(ours().controller.counters, captured=LAYERS, replayed=LAYERS, mismatched=0)


def test_a_model_without_fsdp_keeps_megatrons_helper(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "HAVE_TE_GRAPHS", True)
    monkeypatch.setattr(TECudaGraphHelper, "_discover_layers", lambda self: None)
    plain = trainer.model.module.module
    helper = TECudaGraphHelper([plain], trainer.model.config, LENGTH, 2)
    assert helper.model == [plain] and not enabled().helpers
    monkeypatch.setattr(trainer.model.config, "recompute_granularity", "full")
    with pytest.raises(ConfigurationError, match=r"full, and graphs .* not under Megatron-FSDP"):
        TECudaGraphHelper([plain], trainer.model.config, LENGTH, 2)
    monkeypatch.undo()
    plain.token_dispatcher = DeviceDispatcher.__new__(DeviceDispatcher)
    with pytest.raises(ConfigurationError, match=r"dropless experts .* not under Megatron-FSDP"):
        TECudaGraphHelper([plain], trainer.model.config, LENGTH, 2)
