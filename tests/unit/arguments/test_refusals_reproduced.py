"""What refusals say of the released packages, seen in their own code, without graphs of ours."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.models import backends
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.qk_clip import clip_qk
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, checkpoint
from megatron.core.transformer.cuda_graphs import CudaGraphManager

from megatron_cg.recompute.layers import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.cpu_model import build, transformer_layers
from megatron_cg.tape.tape_backend import FreedStorageError, TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.megatron import capturing_flag, is_capturing
from tests.functional.loops import RECOMPUTE
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

TOKENS = 16


def before_its_step(shape: Any, **options: Any) -> tuple[Any, Any]:
    """A model under Megatron-FSDP with gradients, and Megatron's optimizer that is to use them."""

    model = build(shape)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, **options)
    optimizer = get_megatron_optimizer(config, [model])
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    mask = ~torch.tril(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool))
    loss = model(tokens, torch.arange(TOKENS)[None], mask, labels=tokens)
    optimizer.scale_loss(loss.float().sum()).backward()
    model.module.finish_grad_sync()
    return model, optimizer


@pytest.mark.refuses("implementation")
def test_local_graphs_refuse_the_hooks_of_megatron_fsdp(dense_model: Any) -> None:

    layer: Any = transformer_layers(dense_model)[0]
    manager = object.__new__(CudaGraphManager)
    with pytest.raises(AssertionError, match="user registered pre-forward hooks"):
        manager.call_ddp_preforward_hook(layer)
    assert not any(hasattr(weight, "main_grad") for weight in layer.parameters())


@pytest.mark.refuses("optimizer-graph")
def test_the_optimizers_step_begins_a_gather_that_the_next_pass_waits_for(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = before_its_step(CpuModelConfig(layers=1, bf16=False), clip_grad=0.0)
    own, gathers = model.module.all_gather_and_wait_parameters_ready, list[dict[str, Any]]()

    def gather(**named: Any) -> None:
        gathers.append(named)
        own(**named)

    monkeypatch.setattr(model.module, "all_gather_and_wait_parameters_ready", gather)
    optimizer.step()
    (named,) = gathers
    assert named["prefetch"] and not named["wait_bucket_ready"]
    pipeline = model.module.all_gather_pipeline
    assert {status.name for status in pipeline.bucket_status.values()} >= {"COMMUNICATING"}


@pytest.mark.refuses("fp16")
def test_unscaling_needs_the_gradients_of_all_parameters(one_rank: None) -> None:
    options = {"fp16": True, "params_dtype": torch.float16}
    shape = CpuModelConfig(layers=1, bf16=False, options=options)
    scales: Any = {"initial_loss_scale": 8.0, "min_loss_scale": 1.0}
    _, optimizer = before_its_step(shape, fp16=True, **scales)
    optimizer.get_parameters()[0].grad = None  # as of a parameter that another rank has
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'data'"):
        optimizer.step()


KEPT: list[torch.Tensor] = []
"""Largest logits that a test lets nobody free."""


@pytest.fixture
def largest_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention of megatron-core that keeps its largest logits as the one of TE does."""

    class Attention(backends.DotProductAttention):  # type: ignore[misc]
        current_max_attn_logits: torch.Tensor | None = None

        def forward(self, query: Any, key: Any, *others: Any, **named: Any) -> Any:
            logits = torch.einsum("ibhd,jbhd->bhij", query, key).detach()
            largest, before = logits.amax(dim=(0, 2, 3)), self.current_max_attn_logits
            if before is not None:
                KEPT.append(before)
                largest = torch.max(before, largest)
            self.current_max_attn_logits = largest
            return super().forward(query, key, *others, **named)

    # Like TE's, it is of a class that this package knows.
    Attention.__module__ = backends.DotProductAttention.__module__
    monkeypatch.setattr(backends, "DotProductAttention", Attention)
    yield
    KEPT.clear()


@pytest.mark.refuses("largest-attention-logits")
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "freed"])
def test_a_replay_leaves_no_largest_logits(
    kept: bool, largest_logits: None, one_rank: None, replays_alone: None
) -> None:
    """It also compares with those of capture, which are freed as Megatron takes them."""
    shape = CpuModelConfig(layers=2, bf16=False, graph_modules=("attn",))
    with trainer_of(shape, graphs=True) as trainer:

        def largest() -> float:
            return float(clip_qk([trainer.model], log_max_only=True))

        trainer.step()
        assert largest() != 0.0
        session = trainer.capture(TapeBackend())
        largest()  # takes what the capture left
        if not kept:
            KEPT.clear()
        with nullcontext() if kept else pytest.raises(FreedStorageError, match=r"aten\.maximum"):
            trainer.step()
        assert largest() == 0.0
        if kept:
            expect(session.counters, replayed=2, mismatched=0)


def grouped(dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """torch's grouped GEMM on the meta device, whose checks are those of the GPU's kernel."""
    rows = torch.empty(32, 16, dtype=dtype, device="meta")
    weights = torch.empty(2, 16, 16, dtype=dtype, device="meta").transpose(-1, -2)
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    found: torch.Tensor = torch._grouped_mm(rows, weights, ends, **options)
    return found


@pytest.mark.refuses("grouped-gemm")
def test_torchs_grouped_gemm_takes_bfloat16_without_a_bias() -> None:
    assert grouped(torch.bfloat16).dtype is torch.bfloat16
    for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn):
        with pytest.raises(RuntimeError, match="Expected inputs of BF16 type"):
            grouped(dtype)
    bias = torch.empty(2, 16, dtype=torch.bfloat16, device="meta")
    with pytest.raises(RuntimeError, match="Bias tensor provided, but it is not supported yet"):
        grouped(torch.bfloat16, bias=bias)


LAYERS = 2


@contextmanager
def training(scopes: tuple[str, ...]) -> Iterator[Any]:
    """A trainer of a model that recomputes whole layers, without the rules about it."""
    undo = allow_full_recompute()
    try:
        shape = CpuModelConfig(layers=LAYERS, graph_modules=scopes, options=RECOMPUTE)
        with trainer_of(shape, graphs=True) as trainer:
            trainer.step()
            yield trainer
    finally:
        undo()


def passes(trainer: Any, part: str) -> Counter[str]:
    """How often a step runs a part of the layers through Python, with and without gradients."""
    found: Counter[str] = Counter()

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            found["grad" if torch.is_grad_enabled() else "no grad"] += 1
            return run(*args, **kwargs)

        return forward

    with pytest.MonkeyPatch.context() as changes:
        for layer in transformer_layers(trainer.model):
            changes.setattr(layer, part, counted(getattr(layer, part)))
        trainer.step()
    return found


@pytest.mark.refuses("full-recompute-of-parts")
def test_beside_a_graph_of_a_part_the_rest_of_the_layer_keeps_its_activations(
    one_rank: None,
) -> None:
    with training(("attn",)) as trainer:
        assert passes(trainer, "_forward_mlp") == {"no grad": LAYERS, "grad": LAYERS}
        trainer.capture(TapeBackend())
        trainer.step()  # The first replays are verified beside eager passes.
        assert passes(trainer, "_forward_attention") == {}
        # Once, and not again in the backward pass: it has kept what that reads.
        assert passes(trainer, "_forward_mlp") == {"grad": LAYERS}


@pytest.mark.refuses("recompute-of-attention")
def test_megatrons_checkpoint_rewinds_no_generator_and_runs_once_in_a_capture(
    one_rank: None,
) -> None:
    tracker, generator, runs = CudaRNGStatesTracker(), torch.Generator(), Counter[bool]()
    tracker.states_ = {"model-parallel-rng": generator}
    assert tracker.get_states()["model-parallel-rng"] is generator  # no copy of its state

    def attention(hidden: torch.Tensor) -> torch.Tensor:
        runs[is_capturing()] += 1
        return hidden * 2

    for capture in (nullcontext, capturing_flag):
        with capture():
            checkpoint(attention, False, torch.ones(1, requires_grad=True)).sum().backward()
    assert runs == {False: 2, True: 1}


@pytest.mark.refuses("full-recompute")
def test_a_graph_inside_of_megatrons_checkpoint_is_not_replayed_in_the_first_pass(
    one_rank: None,
) -> None:
    """As a HybridStack, whose layers get no checkpoint of their own."""
    with (
        patch("megatron_cg.tape.train.recompute_in_layers", lambda *_: lambda: None),
        training(()) as trainer,
    ):
        session = trainer.capture(TapeBackend(), policy=ReplayPolicy("eager"))
        trainer.step()  # The first replays are verified beside eager passes.
        assert passes(trainer, "_forward_mlp") == {"no grad": LAYERS}
        # A pass without gradients is none of training, so it is no mismatch.
        expect(session.counters, eager=2 * LAYERS, mismatched=0)
