"""What full recompute with graphs cannot do: seen in Megatron's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute
from megatron_cg.replay.mismatch_policy import ReplayPolicy
from megatron_cg.tools.cpu.cpu_model import transformer_layers
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.functional.loops import RECOMPUTE
from tests.unit.trainers import trainer_of

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


@pytest.mark.refuses("full-recompute")
def test_a_graph_inside_of_megatrons_checkpoint_is_not_replayed_in_the_first_pass(
    one_rank: None,
) -> None:
    """As a HybridStack, whose layers get no checkpoint of their own."""
    with (
        patch("megatron_cg.tools.cpu.train.recompute_in_layers", lambda *_: lambda: None),
        training(()) as trainer,
    ):
        session = trainer.capture(TapeBackend(), policy=ReplayPolicy("eager"))
        trainer.step()  # The first replays are verified beside eager passes.
        assert passes(trainer, "_forward_mlp") == {"no grad": LAYERS}
        assert session.counters.mismatched == 2 * LAYERS
