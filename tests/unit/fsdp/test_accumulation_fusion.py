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
SHARDED, UNSHARDED = ("optim_grads_params", "optim_grads"), ("optim", "no_shard")
OURS = "megatron_cg.tools.cpu.train.weight_gradients_returned"
REFUSED = "megatron_cg.capture.observer.Observer._refuse_marked_weights"
FUSED_WEIGHTS = (
    "linear_qkv.weight",
    "linear_proj.weight",
    "linear_fc1.weight",
    "linear_fc2.weight",
)


def train(
    strategy: str,
    *,
    fused: bool,
    microbatches: int = 2,
    graphs: str = "",
) -> dict[str, Any]:
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
            options={"gradient_accumulation_fusion": fused},
            fsdp_options={"data_parallel_sharding_strategy": strategy},
            graph_modules=("attn", "mlp"),
            bf16=False,
        )
        if graphs in ("fused", "unmarked"):
            undo.enter_context(patch(OURS, lambda *_: lambda: None))
        if graphs == "unmarked":
            undo.enter_context(patch(REFUSED, lambda _unit: None))
        made = trainer_of(shape, graphs=bool(graphs), microbatches=microbatches)
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
    found = {
        f"{strategy} {microbatches} {fused}": train(
            strategy, fused=fused, microbatches=microbatches
        )
        for strategy in UNSHARDED
        for microbatches in (1, 2)
        for fused in (False, True)
    }
    for strategy in SHARDED:
        found[f"{strategy} 2 True"] = train(strategy, fused=True)
        for way in ("fast", "slow", "fused"):
            found[f"{strategy} {way}"] = train(strategy, fused=True, graphs=way)
    found["unmarked"] = train("optim_grads_params", fused=True, graphs="unmarked")
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


def steps(found: dict[str, Any], strategy: str, microbatches: int, *, fused: bool) -> Any:
    return found[f"{strategy} {microbatches} {fused}"]["steps"]


@pytest.mark.refuses("gradient-accumulation-fusion")
@pytest.mark.parametrize("strategy", UNSHARDED)
def test_without_them_a_microbatch_overwrites_the_one_before(
    results: list[dict[str, Any]], strategy: str
) -> None:
    for found in results:
        plain, fused = (steps(found, strategy, 1, fused=f) for f in (False, True))
        assert fused == plain
        plain, fused = (steps(found, strategy, 2, fused=f) for f in (False, True))
        (loss, norm), (fused_loss, fused_norm) = plain[0], fused[0]
        assert loss == fused_loss and norm != fused_norm


@pytest.mark.parametrize("way", ["fast", "slow"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_with_graphs_every_loss_and_norm_is_that_of_eager_fusion(
    results: list[dict[str, Any]], strategy: str, way: str
) -> None:
    for found in results:
        assert found[f"{strategy} {way}"]["steps"] == steps(found, strategy, 2, fused=True)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_layer_that_still_writes_by_itself_is_not_captured(
    results: list[dict[str, Any]], strategy: str
) -> None:
    for found in results:
        error = found[f"{strategy} fused"]["error"]
        assert found[f"{strategy} fused"]["steps"] == steps(found, strategy, 2, fused=True)
        assert "linear_proj.weight into main_grad by itself" in error
        assert "4 such weights" in error and "--no-gradient-accumulation-fusion" in error


@pytest.mark.refuses("gradient-accumulation-fusion")
def test_if_it_were_a_replay_would_hand_over_the_placeholder(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        graphs, eager = found["unmarked"], found["optim_grads_params 2 True"]
        assert graphs["steps"][:CAPTURED] == eager["steps"][:CAPTURED]
        assert graphs["steps"][CAPTURED] != eager["steps"][CAPTURED]
        assert eager["filled"] and all(eager["filled"])
        assert len(graphs["filled"]) == len(eager["filled"]) and not any(graphs["filled"])
