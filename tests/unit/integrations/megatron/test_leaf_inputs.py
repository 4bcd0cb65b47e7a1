"""Gradients of inputs that a caller makes, such as the output of an encoder that is cut off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.unit.counted import expect

STEPS, WARMUP, PASSES, LAYERS = 4, 2, 3, 2
Leaves = list[torch.Tensor]


def views(leaf: torch.Tensor) -> torch.Tensor:
    """Far from the layer."""
    for _ in range(40):
        leaf = leaf.view(leaf.shape)
    return leaf


PROMPT = "a prompt before embeddings"
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda leaf: leaf,
    "a view": lambda leaf: leaf.view(-1, *leaf.shape[2:]).view(leaf.shape),
    "many views": views,
    PROMPT: lambda leaf: torch.cat([leaf, torch.zeros_like(leaf).requires_grad_()]),
}


def trained(way: Callable[[torch.Tensor], torch.Tensor], *, shared: bool, graphs: bool) -> Leaves:
    """Gradients of all leaves, read when all microbatches of a step are done.

    Args:
        way: how a leaf comes to the decoder.
        shared: whether all microbatches of a step get one leaf.
        graphs: whether layers are graphed after the warmup.
    """
    from megatron.core import parallel_state

    from megatron_cg.tools.cpu.train import Trainer

    model = CpuModelConfig(layers=LAYERS, graph_modules=("attn", "mlp"))
    trainer: Any = Trainer(TrainingPlan(model, graphs=graphs))
    torch.manual_seed(3)
    make = _prompt if way is WAYS[PROMPT] else _leaf
    found: Leaves = []
    for step in range(STEPS):
        if graphs and step == WARMUP:
            trainer.capture(TapeBackend())
        leaves = [make(model) for _ in range(1 if shared else PASSES)]
        for number in range(PASSES):
            hidden = way(leaves[number % len(leaves)])
            with (
                nullcontext() if number == PASSES - 1 else trainer._fsdp.no_sync(),
                patch.object(trainer, "model", partial(trainer.model, decoder_input=hidden)),
            ):
                trainer._forward().sum().backward()
        found += [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
        trainer._fsdp.finish_grad_sync()
        trainer._optimizer.step(sync_grad_before_optimizer_step=False)
        trainer._optimizer.zero_grad()
    if graphs:
        expect(trainer.session.counters, replayed=(STEPS - WARMUP) * PASSES * LAYERS, mismatched=0)
        trainer.session.close()
    parallel_state.destroy_model_parallel()
    return found


def _leaf(model: CpuModelConfig) -> torch.Tensor:
    shape = (model.sequence_length, 2, model.hidden_size)
    return torch.randn(shape).to(torch.bfloat16).requires_grad_()


def _prompt(model: CpuModelConfig) -> torch.Tensor:
    """The first half of a sequence."""
    return _leaf(replace(model, sequence_length=model.sequence_length // 2))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_leaf_keeps_its_own_gradient(one_rank: None, way: str, *, shared: bool) -> None:
    eager = trained(WAYS[way], shared=shared, graphs=False)
    replayed = trained(WAYS[way], shared=shared, graphs=True)
    assert len(eager) == STEPS * (1 if shared else PASSES)
    assert all(map(torch.equal, eager, replayed))


def test_weights_under_megatron_fsdp_need_no_copy_of_their_gradient(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_cg.integrations import own_gradients
    from megatron_cg.tools.cpu.train import Trainer

    monkeypatch.setattr(own_gradients, "_Copied", None)
    trainer: Any = Trainer(TrainingPlan(CpuModelConfig(layers=LAYERS), graphs=True))
    trainer.step()
    trainer.capture(TapeBackend())
    try:
        trainer.step()
        expect(trainer.session.counters, replayed=LAYERS)
    finally:
        trainer.session.close()
