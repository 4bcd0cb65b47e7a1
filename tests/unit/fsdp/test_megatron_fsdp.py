"""Megatron-FSDP's model: found, its units gathered alone, its parameters put back as they were.

Gradient-accumulation fusion is refused: Megatron's own linear layers write weight gradients as
Transformer Engine's do, into ``get_main_grad()``, with a mark that is set from Python.
"""

import warnings
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError, UpstreamChangedError
from megatron_cg.fsdp.megatron_fsdp import find_megatron_fsdp, gather_alone, raw_parameters
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of


def test_units_are_gathered_ahead_only_where_all_that_share_buffers_are_captured(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[bool] = []
    pipeline = dense_model.module.all_gather_pipeline
    monkeypatch.setattr(pipeline, "all_gather_params", lambda _, prefetch: ahead.append(prefetch))
    groups = [group for group in pipeline.buffer.parameter_groups if group.fsdp_unit_id is not None]
    for captured in (groups, groups[:1]):
        undo = gather_alone(dense_model.module, [one for g in captured for one in g.params])
        pipeline.all_gather_params([], prefetch=True)
        undo()
    pipeline.all_gather_params([], prefetch=True)
    assert ahead == [True, False, True]


@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_are_sharded_or_raw_after_a_capture_as_before(
    dense_model: Any, sharded: bool
) -> None:
    fsdp = dense_model.module
    fsdp._replace_param_with_distributed_if_needed()
    if not sharded:
        fsdp._replace_param_with_raw_if_needed()
    with raw_parameters(fsdp):
        assert not fsdp.is_param_fsdp_distributed
    assert fsdp.is_param_fsdp_distributed == sharded


def test_what_a_capture_has_prefetched_is_over_without_a_warning(dense_model: Any) -> None:
    fsdp = dense_model.module
    pipeline = fsdp.all_gather_pipeline
    with warnings.catch_warnings(), raw_parameters(fsdp):
        warnings.simplefilter("error")
        pipeline.async_bucket_gather(0, False)
        assert pipeline.param_gather_event_map
    assert not pipeline.param_gather_event_map


def test_a_member_of_megatron_fsdp_that_is_gone_is_named(
    dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_megatron_fsdp(dense_model) is dense_model.module
    monkeypatch.setattr("megatron_cg.fsdp.megatron_fsdp._NEEDED", ("gone",))
    with pytest.raises(UpstreamChangedError, match=r"MegatronFSDP\.gone"):
        find_megatron_fsdp(dense_model)


STEPS, CAPTURED = 3, 1
REFUSED = "megatron_cg.capture.observer.Observer._refuse_marked_weights"
FUSED_WEIGHTS = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")


def train(way: str) -> dict[str, Any]:
    from megatron.core.tensor_parallel import layers as linear

    with ExitStack() as undo:
        # Apex, without which Megatron makes no such layer; under Megatron-FSDP it is not called.
        undo.enter_context(patch.object(linear, "_grad_accum_fusion_available", True))
        # A placeholder of zeros instead of memory as it was, so that the result is always the same.
        zero = patch.object(torch.nn.Parameter, "zero_out_wgrad", True, create=True)
        undo.enter_context(zero)
        if way == "unmarked":
            undo.enter_context(patch(REFUSED, lambda _unit: None))
        shape = CpuModelConfig(
            layers=2,
            options={"gradient_accumulation_fusion": True},
            graph_modules=("attn", "mlp"),
            bf16=False,
        )
        made = trainer_of(shape, graphs=way != "eager", microbatches=2)
        trainer = undo.enter_context(made)
        steps, error = [], ""
        for step in range(STEPS):
            if way != "eager" and step == CAPTURED:
                try:
                    undo.callback(trainer.capture(TapeBackend(), Agreement()).close)
                except CaptureError as caught:
                    error = str(caught)
            steps.append([number.hex() for number in trainer.step()])
        shards = [
            parameter.grad.to_local()
            for name, parameter in trainer._fsdp.named_parameters()
            if name.endswith(FUSED_WEIGHTS) and parameter.grad is not None
        ]
        filled = [bool(shard.any()) for shard in shards if shard.numel()]
        return {"steps": steps, "error": error, "filled": filled}


def train_all() -> dict[str, Any]:
    return {way: train(way) for way in ("eager", "marked", "unmarked")}


@pytest.mark.refuses("gradient-accumulation-fusion")
def test_a_layer_that_writes_its_gradient_by_itself_is_not_captured() -> None:
    for found in on_ranks(train_all):
        eager, marked, graphs = found["eager"], found["marked"], found["unmarked"]
        assert marked["steps"] == eager["steps"]
        assert "linear_proj.weight into main_grad by itself" in marked["error"]
        assert "4 such weights" in marked["error"]
        # A replay would hand over the placeholder.
        assert graphs["steps"][:CAPTURED] == eager["steps"][:CAPTURED]
        assert graphs["steps"][CAPTURED] != eager["steps"][CAPTURED]
        assert eager["filled"] and all(eager["filled"])
        assert len(graphs["filled"]) == len(eager["filled"]) and not any(graphs["filled"])
