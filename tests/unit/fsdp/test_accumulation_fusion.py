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
    layers: int = 2,
    microbatches: int = 2,
    graphs: str = "",
    tensor_parallel: int = 1,
) -> dict[str, Any]:
    """Losses and norms, to the last bit, whose gradients are not zero, and where buckets are."""
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
            layers=layers,
            tensor_parallel=tensor_parallel,
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
        places = places_of_buckets(trainer)
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
        moves = sum(len(set(found)) > 1 for found in places.values())
        return {
            "steps": steps,
            "error": error,
            "filled": filled,
            "buckets": len(places),
            "uses": min(map(len, places.values()), default=0),
            "moved": moves,
        }


def places_of_buckets(trainer: Any) -> dict[int, list[int]]:
    """Where each unit's bucket is whenever a gradient is written to it, by the bucket's number."""
    places: dict[int, list[int]] = {}
    for number, group in enumerate(trainer._fsdp.param_and_grad_buffer.parameter_groups):
        if group.fsdp_unit_id is not None:
            buffer = group.main_grad_buffer
            fetch, found = buffer.fetch_bucket, places.setdefault(number, [])

            def noted(*args: Any, fetch: Any = fetch, found: Any = found, **named: Any) -> Any:
                bucket = fetch(*args, **named)
                found.append(bucket.data.data_ptr())
                return bucket

            buffer.fetch_bucket = noted
    return places


def train_all() -> dict[str, Any]:
    found = {
        f"{strategy} {microbatches} {fused}": train(
            strategy, fused=fused, microbatches=microbatches
        )
        for strategy in (*SHARDED, *UNSHARDED)
        for microbatches in (1, 2)
        for fused in (False, True)
    }
    for fused in (False, True):
        found[f"one rank {fused}"] = train("optim_grads_params", fused=fused, tensor_parallel=2)
    found["odd"] = train("optim_grads_params", fused=True, layers=3, microbatches=3)
    for strategy in SHARDED:
        for way in ("fast", "slow", "fused"):
            found[f"{strategy} {way}"] = train(strategy, fused=True, graphs=way)
    found["unmarked"] = train("optim_grads_params", fused=True, graphs="unmarked")
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return on_ranks(train_all)


def steps(found: dict[str, Any], strategy: str, microbatches: int, *, fused: bool) -> Any:
    return found[f"{strategy} {microbatches} {fused}"]["steps"]


@pytest.mark.parametrize("strategy", SHARDED)
def test_with_sharded_gradients_eager_fusion_is_right(
    results: list[dict[str, Any]], strategy: str
) -> None:
    for found in results:
        for microbatches in (1, 2):
            plain, fused = (steps(found, strategy, microbatches, fused=f) for f in (False, True))
            assert fused == plain


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


@pytest.mark.refuses("gradient-accumulation-fusion")
def test_nor_where_one_rank_has_all_of_a_gradient(results: list[dict[str, Any]]) -> None:
    for found in results:
        (loss, norm), (fused_loss, fused_norm) = (
            found[f"one rank {fused}"]["steps"][0] for fused in (False, True)
        )
        assert loss == fused_loss and norm != fused_norm


@pytest.mark.parametrize("name", ["optim_grads_params 2 True", "odd"])
def test_a_bucket_is_always_in_the_same_of_the_double_buffers(
    results: list[dict[str, Any]], name: str
) -> None:
    for found in results:
        assert found[name]["buckets"] > 1 and found[name]["uses"] >= STEPS
        assert found[name]["moved"] == 0


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
