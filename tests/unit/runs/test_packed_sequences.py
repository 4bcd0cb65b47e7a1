"""Packed sequences: graphs of attention take boundaries as an input; other graphs need none.

Sequences of a pack have other lengths, and other numbers, in every step; tokens of a pack do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_cg.backends.tape.tape_backend import TapeBackend
from megatron_cg.capture.session import close_all_sessions
from megatron_cg.integrations.megatron.full_recompute import allow_full_recompute
from megatron_cg.integrations.megatron.packs import fix_packs
from megatron_cg.tools.cpu.training_plan import CpuModelConfig, TrainingPlan
from tests.functional.tampering.packs import boundaries
from tests.unit.counted import expect
from tests.unit.one_mask import OneMask
from tests.unit.trainers import trainer_of

LAYERS, TOKENS, BEFORE, AFTER, MOST = 2, 16, 2, 3, 4
PACKS = ((0, 5, 16), (0, 16), (0, 3, 4, 11, 16), (0, 8, 16), (0, 1, 16))
"""Where the sequences of each step's pack begin, and the end of the last."""
MOE: dict[str, Any] = {"experts": 4}
CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def packed(attention: Any) -> Any:
    """megatron-core's own attention, which takes packs as TE's does: ``[tokens, heads, width]``."""

    class Attention(attention):  # type: ignore[misc]
        def forward(self, *tensors: Any, packed_seq_params: Any = None, **named: Any) -> Any:
            if packed_seq_params is None:
                return super().forward(*tensors, **named)
            query, key, value = (tensor.unsqueeze(1) for tensor in tensors[:3])
            starts = packed_seq_params.cu_seqlens_q
            places = torch.arange(query.shape[0], device=query.device)
            pack = torch.bucketize(places, starts, right=True)
            others = pack[:, None] != pack[None, :]
            later = torch.ones_like(others).triu(1)
            mask = (others | later).reshape(1, 1, *others.shape)
            return super().forward(query, key, value, mask, **named)

    # Like the one of TE, it is of a class that this package knows.
    Attention.__module__ = attention.__module__
    return Attention


@contextmanager
def attention_of_packs() -> Iterator[None]:
    """Models that are built inside of the block have attention that takes packs."""
    from megatron.core.models import backends

    from megatron_cg.tools.cpu.fakes import replaced

    with replaced(backends, "DotProductAttention", packed(backends.DotProductAttention)):
        yield


def train(
    scopes: tuple[str, ...],
    *,
    graphed: bool,
    most: int | None = None,
    packs: Sequence[tuple[int, ...]] = PACKS,
    model: Mapping[str, Any] | None = None,
    before: int = BEFORE,
    **fields: Any,
) -> tuple[Any, Any]:
    """Losses and norms of all steps, and the counters of the graphs.

    ``most`` is as ``--cg-pack-sequences``, ``model`` has other fields of the model's config, and
    ``fields`` are of the packs' objects. No pack is passed if ``packs`` are empty tuples.
    """
    settings: dict[str, Any] = {"dropout": 0.1, "bf16": False} | dict(model or {})
    shape = CpuModelConfig(layers=LAYERS, sequence_length=TOKENS, graph_modules=scopes, **settings)
    with ExitStack() as undo:
        undo.callback(allow_full_recompute())
        if most is not None:
            undo.callback(fix_packs(most))
        with (
            attention_of_packs(),
            trainer_of(shape, micro_batch_size=1, graphs=graphed) as trainer,
        ):
            whole = trainer.model

            def step(starts: tuple[int, ...]) -> tuple[float, float]:
                pack = replace(boundaries(starts, "cpu"), **fields) if starts else None
                trainer.model = partial(whole, packed_seq_params=pack)
                numbers: tuple[float, float] = trainer.step()
                trainer.model = whole
                return numbers

            numbers = [step(starts) for starts in packs[:before]]
            if graphed:
                trainer.capture(TapeBackend())
            numbers += [step(starts) for starts in packs[before:]]
            return numbers, trainer.session and trainer.session.counters


@pytest.mark.parametrize(
    ("scopes", "model"),
    [
        (("mlp",), {}),
        (("moe_router", "moe_preprocess"), MOE),
        (("moe",), {**MOE, "options": CAPACITY}),
    ],
)
def test_graphs_behind_attention_replay(
    one_rank: None, scopes: tuple[str, ...], model: dict[str, Any]
) -> None:
    eager, _ = train(scopes, graphed=False, model=model)
    graphed, counters = train(scopes, graphed=True, model=model)
    assert graphed == eager and len(set(eager)) == len(PACKS)
    expect(counters, replayed=LAYERS * AFTER, mismatched=0, eager=0)


@pytest.mark.refuses("packed-sequences", "pack-sequences-least")
@pytest.mark.parametrize(
    ("scopes", "model"),
    [
        (("attn", "mlp"), {}),
        (("attn",), {"bf16": True}),
        (("attn", "moe_router"), MOE),
        (("attn", "moe"), {**MOE, "options": CAPACITY}),
        (("attn",), {"options": {"rotary_interleaved": True}}),
        ((), {"options": RECOMPUTED, "dropout": 0.0}),
    ],
    ids=str,
)
def test_attention_replays(one_rank: None, scopes: tuple[str, ...], model: dict[str, Any]) -> None:
    plain, _ = train(scopes, graphed=False, model=model)
    eager, _ = train(scopes, graphed=False, model=model, most=MOST)
    graphed, counters = train(scopes, graphed=True, model=model, most=MOST)
    assert graphed == eager == plain and len(set(eager)) == len(PACKS)
    expect(counters, replayed=LAYERS * AFTER, mismatched=0, eager=0)


def test_a_capture_before_the_first_step_expects_packs(one_rank: None) -> None:
    eager, _ = train(("attn",), graphed=False, most=MOST)
    graphed, counters = train(("attn",), graphed=True, most=MOST, before=0)
    assert graphed == eager
    expect(counters, replayed=LAYERS * len(PACKS), mismatched=0)


def test_sequences_without_tokens_and_tokens_behind_the_last_sequence(one_rank: None) -> None:
    packs = ((0, 5, 5, TOKENS), (0, TOKENS), (0, 3, 3, 11), (0, 8, 8, 8, TOKENS), (0, 0, 12))
    eager, _ = train(("attn",), graphed=False, packs=packs, most=MOST)
    graphed, counters = train(("attn",), graphed=True, packs=packs, most=MOST)
    assert graphed == eager
    expect(counters, replayed=LAYERS * AFTER, mismatched=0)


def test_multi_token_prediction_replays(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also reads boundaries where it shifts tokens and labels."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_cg.tools.cpu import cpu_model

    whole: Any = cpu_model.GPTModel  # type: ignore[attr-defined]

    def predicting(config: Any, transformer_layer_spec: Any, **named: Any) -> Any:
        spec = get_gpt_mtp_block_spec(config, transformer_layer_spec, use_transformer_engine=False)
        return whole(config, transformer_layer_spec, mtp_block_spec=spec, **named)

    monkeypatch.setattr(cpu_model, "GPTModel", predicting)
    model = {"options": {"mtp_num_layers": 1}}
    plain, _ = train(("attn",), graphed=False, model=model)
    eager, _ = train(("attn",), graphed=False, model=model, most=MOST)
    graphed, counters = train(("attn",), graphed=True, model=model, most=MOST)
    assert graphed == eager == plain
    expect(counters, replayed=(LAYERS + 1) * AFTER, mismatched=0)


@pytest.mark.refuses("packed-sequences", "pack-sequences-least")
@pytest.mark.parametrize(
    "packs",
    [
        (*PACKS[:BEFORE], (0, 1, 2, 3, 4, 16), *PACKS[3:]),
        (*PACKS[:BEFORE], (), *PACKS[3:]),
    ],
    ids=["more sequences", "no pack"],
)
def test_another_form_runs_eagerly(one_rank: None, packs: Sequence[tuple[int, ...]]) -> None:
    eager, _ = train(("attn",), graphed=False, packs=packs, most=MOST)
    graphed, counters = train(("attn",), graphed=True, packs=packs, most=MOST)
    assert graphed == eager
    expect(counters, replayed=LAYERS * (AFTER - 1), mismatched=LAYERS, eager=LAYERS)


def test_samples_that_a_pack_joins_are_not_balanced_as_one(one_rank: None) -> None:
    """A router behind attention: its graph has not been told where a sample ends."""
    model = {
        **MOE,
        "options": {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.5,
        },
    }
    joined = partial(train, ("moe_router",), model=model)
    eager, _ = joined(graphed=False, tokens_per_sample=TOKENS // 2)
    graphed, counters = joined(graphed=True, tokens_per_sample=TOKENS // 2)
    assert graphed == eager != joined(graphed=False)[0]
    expect(counters, replayed=0, mismatched=LAYERS * AFTER, eager=LAYERS * AFTER)
    one, counters = joined(graphed=True, tokens_per_sample=TOKENS)
    assert one == joined(graphed=False)[0]
    expect(counters, replayed=LAYERS * AFTER, mismatched=0)


def test_without_a_bound_a_graph_of_attention_would_never_be_replayed(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Why ``packed-sequences`` is refused: the graphs would only cost memory."""
    eager, _ = train(("attn", "mlp"), graphed=False)
    graphed, counters = train(("attn", "mlp"), graphed=True)
    assert graphed == eager
    expect(counters, replayed=0, mismatched=LAYERS * AFTER, eager=LAYERS * AFTER)
    assert "argument packed_seq_params" in caplog.text


def test_megatrons_helper_captures_with_packs(one_rank: None) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    from megatron_cg.integrations.megatron.helper import FsdpHelper, new_helper
    from megatron_cg.tools.cpu.train import Trainer

    shape = CpuModelConfig(layers=LAYERS, sequence_length=TOKENS, graph_modules=("attn", "mlp"))
    calculator.init_num_microbatches_calculator(0, None, 1, 1, 1)
    undo = fix_packs(MOST)
    try:
        with attention_of_packs():
            trainer: Any = Trainer(TrainingPlan(shape, micro_batch_size=1))
        whole = trainer.model
        made = partial(new_helper, [whole], whole.config, TOKENS, 1, [trainer._optimizer])
        helper: Any = FsdpHelper(made, OneMask())
        helper.capture()
        for starts in PACKS:
            trainer.model = partial(whole, packed_seq_params=boundaries(starts, "cpu"))
            trainer.step()
        expect(helper.session.counters, replayed=LAYERS * len(PACKS), mismatched=0, eager=0)
        helper.close()
    finally:
        undo()
        close_all_sessions()
        calculator.destroy_num_microbatches_calculator()
