"""Packed sequences: attention sees where each sequence ends and stays eager; the MLP replays.

Sequences of a pack have other lengths, and other numbers, in every step; tokens of a pack do not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.tools.cpu.training_plan import CpuModelConfig
from tests.functional.tampering.packs import boundaries
from tests.unit.counted import expect
from tests.unit.trainers import trainer_of

LAYERS, TOKENS, BEFORE, AFTER = 2, 16, 2, 3
PACKS = ((0, 5, 16), (0, 16), (0, 3, 4, 11, 16), (0, 8, 16), (0, 1, 16))
"""Where the sequences of each step's pack begin, and the end of the last."""


def packed(attention: Any) -> Any:
    """megatron-core's own attention, which takes packs as TE's does: ``[tokens, heads, width]``."""

    class Attention(attention):  # type: ignore[misc]
        def forward(self, *tensors: Any, packed_seq_params: Any = None, **named: Any) -> Any:
            if packed_seq_params is None:
                return super().forward(*tensors, **named)
            query, key, value = (tensor.unsqueeze(1) for tensor in tensors[:3])
            starts = packed_seq_params.cu_seqlens_q
            pack = torch.bucketize(torch.arange(query.shape[0]), starts, right=True)
            others = pack[:, None] != pack[None, :]
            later = torch.ones_like(others).triu(1)
            mask = (others | later).reshape(1, 1, *others.shape)
            return super().forward(query, key, value, mask, **named)

    return Attention


def train(scopes: tuple[str, ...], *, graphed: bool) -> tuple[Any, Any]:
    """Losses and norms of all steps, and the counters of the graphs."""
    from megatron.core.models import backends

    from megatron_cg.tools.cpu.fakes import replaced

    shape = CpuModelConfig(
        layers=LAYERS,
        sequence_length=TOKENS,
        graph_modules=scopes,
        dropout=0.1,
        bf16=False,
    )
    attention = packed(backends.DotProductAttention)
    with (
        replaced(backends, "DotProductAttention", attention),
        trainer_of(shape, micro_batch_size=1, graphs=graphed) as trainer,
    ):
        model = trainer.model

        def step(starts: tuple[int, ...]) -> tuple[float, float]:
            trainer.model = partial(model, packed_seq_params=boundaries(starts, "cpu"))
            numbers: tuple[float, float] = trainer.step()
            trainer.model = model
            return numbers

        numbers = [step(starts) for starts in PACKS[:BEFORE]]
        if graphed:
            trainer.capture(TapeBackend())
        numbers += [step(starts) for starts in PACKS[BEFORE:]]
        return numbers, trainer.session and trainer.session.counters


def test_the_mlp_replays(one_rank: None) -> None:
    eager, _ = train(("mlp",), graphed=False)
    graphed, counters = train(("mlp",), graphed=True)
    assert graphed == eager and len(set(eager)) == len(PACKS)
    expect(counters, replayed=LAYERS * AFTER, mismatched=0, eager=0)


def test_a_graph_of_attention_would_never_be_replayed(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Why ``packed-sequences`` is refused: the graphs would only cost memory."""
    eager, _ = train(("attn", "mlp"), graphed=False)
    graphed, counters = train(("attn", "mlp"), graphed=True)
    assert graphed == eager
    expect(counters, replayed=0, mismatched=LAYERS * AFTER, eager=LAYERS * AFTER)
    assert "argument packed_seq_params" in caplog.text


def test_megatrons_own_replay_takes_no_pack(one_rank: None) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cg.tools.cpu.cpu_model import build, transformer_layers
    from megatron_cg.tools.cpu.training_plan import CpuModelConfig

    (layer,) = transformer_layers(build(CpuModelConfig(layers=1)))
    with pytest.raises(AssertionError, match="packed_seq_params are excluded from input list"):
        TransformerLayer._te_cuda_graph_replay(
            layer, torch.zeros(TOKENS, 1, 32), packed_seq_params=PackedSeqParams()
        )
