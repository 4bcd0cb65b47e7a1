"""Gradient-accumulation fusion on the released Megatron-FSDP, eagerly and with graphs.

Megatron's own linear layers write their weight gradients as Transformer Engine's do: into
``get_main_grad()``, with ``grad_added_to_main_grad`` set from Python. Without a GPU they compute by
the same product with the fusion and without it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.unit.ranks import on_ranks
from tests.unit.trainers import trainer_of

STEPS, CAPTURED = 3, 1
SHARDED = ("optim_grads_params", "optim_grads")
OURS = "megatron_cg.tools.cpu.train.weight_gradients_returned"
REFUSED = "megatron_cg.capture.observer.Observer._refuse_marked_weights"
FUSED_WEIGHTS = (
    "linear_qkv.weight",
    "linear_proj.weight",
    "linear_fc1.weight",
    "linear_fc2.weight",
)


def train(strategy: str, graphs: str = "") -> dict[str, Any]:
    """Losses and norms, to the last bit, and whose gradients are not zero."""
    from megatron.core.tensor_parallel import layers as linear

    from megatron_cg.backends.tape.tape_backend import TapeBackend
    from megatron_cg.consensus.exchange import Agreement
    from megatron_cg.errors import CaptureError

    with ExitStack() as undo:
        # Apex, without which Megatron makes no such layer; under Megatron-FSDP it is not called.
        undo.enter_context(patch.object(linear, "_grad_accum_fusion_available", True))
        # A placeholder of zeros instead of memory as it was, so that the result is always the same.
        zero = patch.object(torch.nn.Parameter, "zero_out_wgrad", True, create=True)
        undo.enter_context(zero)
        shape = CpuModelConfig(
            layers=2,
            options={"gradient_accumulation_fusion": True},
            fsdp_options={"data_parallel_sharding_strategy": strategy},
            graph_modules=("attn", "mlp"),
            bf16=False,
        )
        if graphs in ("fused", "unmarked"):
            undo.enter_context(patch(OURS, lambda *_: lambda: None))
        if graphs == "unmarked":
            undo.enter_context(patch(REFUSED, lambda _unit: None))
        made = trainer_of(shape, graphs=bool(graphs), microbatches=2)
        trainer = undo.enter_context(made)
        steps, error = [], ""
        for step in range(STEPS):
            if graphs and step == CAPTURED:
                fast = graphs == "fast"
                try:
                    session = trainer.capture(TapeBackend(), Agreement(), fast_path=fast)
                    undo.callback(session.close)
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
    found = {}
    for strategy in SHARDED:
        found[f"{strategy} eager"] = train(strategy)
        for way in ("fast", "slow", "fused"):
            found[f"{strategy} {way}"] = train(strategy, way)
    found["unmarked"] = train("optim_grads_params", "unmarked")
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


@pytest.mark.parametrize("way", ["fast", "slow"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_with_graphs_every_loss_and_norm_is_that_of_eager_fusion(
    results: list[dict[str, Any]], strategy: str, way: str
) -> None:
    for found in results:
        assert found[f"{strategy} {way}"]["steps"] == found[f"{strategy} eager"]["steps"]


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_layer_that_still_writes_by_itself_is_not_captured(
    results: list[dict[str, Any]], strategy: str
) -> None:
    for found in results:
        error = found[f"{strategy} fused"]["error"]
        assert found[f"{strategy} fused"]["steps"] == found[f"{strategy} eager"]["steps"]
        assert "linear_proj.weight into main_grad by itself" in error
        assert "4 such weights" in error and "--no-gradient-accumulation-fusion" in error


@pytest.mark.refuses("gradient-accumulation-fusion")
def test_if_it_were_a_replay_would_hand_over_the_placeholder(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        graphs, eager = found["unmarked"], found["optim_grads_params eager"]
        assert graphs["steps"][:CAPTURED] == eager["steps"][:CAPTURED]
        assert graphs["steps"][CAPTURED] != eager["steps"][CAPTURED]
        assert eager["filled"] and all(eager["filled"])
        assert len(graphs["filled"]) == len(eager["filled"]) and not any(graphs["filled"])
