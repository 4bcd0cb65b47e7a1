"""Packed sequences in graphs of attention: what ranks agree on, and packs that do not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import CaptureError
from megatron_cg.integrations.megatron import packs
from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.tape.training_plan import CpuModelConfig
from tests.unit.counted import expect
from tests.unit.packs import pack_of, packs_on_cpu
from tests.unit.ranks import on_ranks
from tests.unit.trainers import helper_of, microbatch_of, trainer_of

LAYERS, TOKENS, BEFORE = 2, 32, 2
FUSED = {"apply_rope_fusion": True}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
ZERO1 = {"data_parallel_sharding_strategy": "optim"}
"""The first layer then gets the transposed embeddings as they are."""
DENSE: dict[str, Any] = {"graph_modules": ("attn",), "options": FUSED, "fsdp_options": ZERO1}
EXPERTS: dict[str, Any] = {
    "experts": 4,
    "expert_parallel": 2,
    "graph_modules": ("attn", "moe"),
    "options": FUSED | PADDED,
}
"""Its graphs exchange tokens between ranks."""
MIXED: dict[str, Any] = {"graph_modules": ("attn", "mlp"), "options": FUSED}


def even(samples: int) -> Any:
    """A pack of so many samples, of two tokens but for the last one."""
    return pack_of((0, *accumulate([2] * (samples - 1)), TOKENS))


def numbers_of(trainer: Any, packs: list[Any], capture: Any, **fields: Any) -> list[Any]:
    """Losses and norms of a step for each pack, with graphs from step ``BEFORE`` on."""
    whole, numbers = trainer.model, []
    for step, pack in enumerate(packs):
        if step == BEFORE and capture is not None:
            capture()
        trainer.model = partial(whole, packed_seq_params=pack, **fields)
        numbers.append([number.hex() for number in trainer.step()])
        trainer.model = whole
    return numbers


@contextmanager
def trainer_of_packs(
    model: dict[str, Any] = DENSE, *, graphs: bool = True, layers: int = LAYERS
) -> Iterator[Any]:
    shape = CpuModelConfig(layers=layers, sequence_length=TOKENS, **model)
    with packs_on_cpu(), trainer_of(shape, micro_batch_size=1, graphs=graphs) as trainer:
        yield trainer


def both(model: dict[str, Any], packs: list[Any], room: int | None = None) -> Any:
    """Whether eager and graphed steps are equal on this rank, and the counters and the room."""
    runs = []
    for graphs in (False, True):
        with trainer_of_packs(model, graphs=graphs) as trainer:
            capture = partial(trainer.capture, TapeBackend(), Agreement(), packed_samples=room)
            runs.append(numbers_of(trainer, packs, capture if graphs else None))
    session = trainer.session
    return runs[0] == runs[1], dict(session.counters), session.units[0]._packs.room


def of_rank(model: dict[str, Any], by_rank: list[list[int]], room: int | None) -> Any:
    return both(model, [even(samples) for samples in by_rank[dist.get_rank()]], room)


@pytest.mark.parametrize(
    ("kind", "ends", "unfit"),
    [("thd", [0, 8], ""), ("bshd", [0, 8], "qkv_format"), ("thd", None, "qkv_format")],
)
def test_graphs_take_packs_of_one_form(kind: str, ends: list[int] | None, unfit: str) -> None:
    boundaries = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    pack = PackedSeqParams(qkv_format=kind, cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)
    assert packs.PackForm.of(pack)[0].unfit(8) == unfit


def test_all_ranks_have_room_for_the_fullest_pack() -> None:
    """Of any rank, before the capture; one rank alone runs a fuller one eagerly."""
    body = partial(of_rank, DENSE, [[1, 3, 14, 16, 1], [2, 12, 1, 17, 16]], None)
    ranks = on_ranks(body)
    assert [(equal, room) for equal, _, room in ranks] == [(True, 16)] * 2
    for (_, counters, _), unfit in zip(ranks, (0, 1), strict=True):
        expect(Counters(**counters), replayed=LAYERS * (3 - unfit), mismatched=LAYERS * unfit)


def test_ranks_run_graphs_with_collectives_eagerly_together() -> None:
    ranks = on_ranks(partial(of_rank, EXPERTS, [[1, 2, 2, 1, 2], [2, 1, 1, 3, 2]], 2))
    assert [(equal, room) for equal, _, room in ranks] == [(True, 2)] * 2
    for _, counters, _ in ranks:
        expect(Counters(**counters), replayed=LAYERS * 2, mismatched=LAYERS, eager=LAYERS)


def test_joined_samples_stay_eager(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    with trainer_of_packs() as trainer:
        given = [pack_of((0, 4, TOKENS), tokens_per_sample=TOKENS // 2)] * 3
        numbers_of(trainer, given, partial(trainer.capture, TapeBackend()))
    assert "no graph takes tokens_per_sample of theirs" in caplog.text
    expect(trainer.session.counters, replayed=0, mismatched=LAYERS)


def differing() -> Any:
    """Rank 1 has boundaries of keys of their own."""
    with trainer_of_packs() as trainer:
        given = [even(2) for _ in range(3)]
        for pack in given:
            pack.cu_seqlens_kv = pack.cu_seqlens_q.clone() if dist.get_rank() else pack.cu_seqlens_q
        numbers_of(trainer, given, partial(trainer.capture, TapeBackend(), Agreement()))
        return dict(trainer.session.counters)


def test_packs_that_differ_between_ranks_stay_eager() -> None:
    for counters in on_ranks(differing):
        expect(Counters(**counters), replayed=0, mismatched=LAYERS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_seqlen_q": TOKENS + 1}, "was of samples of up to 32 tokens at capture"),
        ({"pad_between_seqs": True}, "('pad_between_seqs', True)"),
        ({"cu_seqlens_kv": even(2).cu_seqlens_q}, "(('cu_seqlens_q',), ('cu_seqlens_kv',))"),
        (None, "argument packed_seq_params.cu_seqlens_q was a tensor at capture"),
    ],
    ids=str,
)
def test_a_pack_of_another_form_runs_eagerly(
    one_rank: None, change: dict[str, Any] | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = [even(2) for _ in range(4)]
    given[2] = None if change is None else pack_of((0, 2, TOKENS), **change)
    equal, counters, _ = both(DENSE, given)
    assert equal and said in caplog.text
    expect(Counters(**counters), replayed=LAYERS, mismatched=LAYERS)


def test_megatrons_helper_captures_packs(one_rank: None) -> None:
    """With a scope for some layers alone, and a verified replay."""
    runs = []
    for graphs in (False, True):
        with microbatch_of(1), trainer_of_packs(MIXED, graphs=graphs, layers=3) as trainer:
            helper = helper_of(trainer, TapeBackend(), "attn:0-1", size=1) if graphs else None
            if helper is not None:
                helper.steps.begin(0)
            given = [even(samples) for samples in (2, 3, 5, 1, 4)]
            runs.append(numbers_of(trainer, given, helper and helper.capture))
            if helper is not None:
                session = helper.session
                expect(session.counters, captured=3, replayed=3 * 3, mismatched=0, eager=0)
                helper.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("has_another", [True, False])
def test_only_kernels_whose_bits_are_equal_are_captured(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, has_another: bool
) -> None:
    """Where TE has no other kernel, it raises a ValueError."""
    with trainer_of_packs(layers=1) as trainer:

        def capture() -> None:
            monkeypatch.setattr(packs, "fuses_attention", lambda: False)
            if not has_another:
                none = ValueError("No dot product attention backend is available for these inputs.")
                monkeypatch.setattr(packs.Packs, "join", MagicMock(side_effect=none))
            trainer.capture(TapeBackend())

        with pytest.raises(CaptureError, match="--attention-backend fused"):
            numbers_of(trainer, [even(2)] * 3, capture)
