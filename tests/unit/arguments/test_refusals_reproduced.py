"""What refusals say of the released packages, seen in their own code, without graphs of ours."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.models import backends
from megatron.core.optimizer.qk_clip import clip_qk
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, checkpoint

from megatron_cg.recompute.layers import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tape.cpu_model import transformer_layers
from megatron_cg.tape.tape_backend import FreedStorageError, TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from megatron_cg.upstream.megatron import capturing_flag, is_capturing
from tests.functional.loops import RECOMPUTE
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

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
