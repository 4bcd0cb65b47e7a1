"""The form that all packs have, positions in it, and next tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.errors import ConfigurationError, UpstreamChangedError
from megatron_cg.integrations.megatron.packs import FixedPack, fix_packs, most_sequences
from tests.functional.tampering.packs import boundaries

TOKENS, MOST = 16, 4


class One:
    """A group of this rank."""

    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call it with a pack and a model's settings: the pack that ``GPTModel.forward`` gets."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    def forward(self: Any, input_ids: Any, packed_seq_params: Any = None) -> Any:
        return packed_seq_params

    def call(pack: Any, *, ranks: int = 1, positions: str = "rope") -> Any:
        config = SimpleNamespace(context_parallel_size=ranks)
        model: Any = SimpleNamespace(config=config, position_embedding_type=positions)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        return GPTModel.forward(model, tokens, packed_seq_params=pack)

    monkeypatch.setattr(GPTModel, "forward", forward)
    undo = fix_packs(MOST)
    yield call
    undo()


@pytest.mark.parametrize(
    "fields",
    [
        {"qkv_format": "sbhd"},
        {"cu_seqlens_kv": torch.tensor([0, 16])},
        {"cu_seqlens_q_padded": torch.tensor([0, 16])},
        {"pad_between_seqs": True},
        {"local_cp_size": 1},
        {"total_tokens": 16},
        {"tokens_per_sample": 8},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_packs_that_a_graph_cannot_hold_stay_as_they_are(
    fields: dict[str, Any], passed_on: Any
) -> None:
    pack = replace(boundaries((0, 8, 16), "cpu"), **fields)
    assert passed_on(pack) is pack


def test_all_other_packs_have_one_form(passed_on: Any) -> None:
    plain = boundaries((0, 8, 16), "cpu")
    fixed = passed_on(replace(plain, cu_seqlens_q_padded=plain.cu_seqlens_q))
    assert isinstance(fixed, FixedPack) and fixed.boundaries.tolist() == [0, 8, 16, 16, 16]
    assert fixed.boundaries.dtype == torch.int32 and fixed.max_seqlen_q == TOKENS
    assert passed_on(fixed) is fixed
    assert passed_on(None) is None


def test_mrope_is_refused(passed_on: Any) -> None:
    with pytest.raises(ConfigurationError, match="a row for each token of the pack"):
        passed_on(boundaries((0, 8, 16), "cpu"), positions="mrope")
    assert passed_on(None, positions="mrope") is None


def rotated(starts: tuple[int, ...], rows: int, **options: Any) -> torch.Tensor:
    """The tokens of a pack, rotated by the first ``rows`` of a table of angles."""
    from megatron.core.models.common.embeddings import rope_utils

    torch.manual_seed(1)
    table, queries = torch.randn(TOKENS, 1, 1, 8), torch.randn(TOKENS, 2, 8)
    turned: torch.Tensor = rope_utils._apply_rotary_pos_emb_thd(
        queries, torch.tensor(starts, dtype=torch.int32), table[:rows], cp_group=One(), **options
    )
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_positions_begin_anew_in_each_sequence(interleaved: bool, latent: bool) -> None:
    """As megatron-core rotates them with a table of fewer rows than the pack has tokens."""
    starts = (0, 3, 4, 11, TOKENS)
    options: dict[str, Any] = {
        "rotary_interleaved": interleaved,
        "mla_rotary_interleaved": latent,
        "mscale": 1.3,
    }
    theirs, of_the_pack = (rotated(starts, rows, **options) for rows in (7, TOKENS))
    undo = fix_packs(MOST)
    asked, ours = most_sequences(), rotated(starts, TOKENS, **options)
    undo()
    assert (asked, most_sequences()) == (MOST, None)
    assert torch.equal(ours, theirs) and not torch.equal(ours, of_the_pack)


@pytest.mark.parametrize(
    "starts", [(0, 5, 16), (0, 16), (0, 3, 4, 11, 16, 16, 16), (0, 4, 4, 12), (0, 1, 2, 15, 16)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_tokens_are_shifted_as_megatron_shifts_them(
    starts: tuple[int, ...], dtype: torch.dtype
) -> None:
    from megatron.core.transformer import multi_token_prediction as prediction

    torch.manual_seed(1)
    pack, tokens = boundaries(starts, "cpu"), torch.randn(2, TOKENS).mul(9).to(dtype)

    def shifted() -> tuple[torch.Tensor, torch.Tensor]:
        moved, total = prediction.roll_tensor(tokens, packed_seq_params=pack)
        return moved, total

    theirs = shifted()
    undo = fix_packs(MOST)
    ours = shifted()
    undo()
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("name", ["_apply_rotary_pos_emb_thd", "_roll_tensor_packed_seq"])
def test_functions_of_another_release_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import multi_token_prediction as prediction

    for module in (rope_utils, prediction):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_: None)
    with pytest.raises(UpstreamChangedError, match=name):
        fix_packs(MOST)
    assert most_sequences() is None


class ReadsOfTheHost(TorchDispatchMode):
    """Counts values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_reads_no_boundary() -> None:
    from megatron.core.transformer import multi_token_prediction as prediction

    def reads() -> Any:
        with ReadsOfTheHost() as mode:  # type: ignore[no-untyped-call]
            rotated((0, 3, TOKENS), TOKENS)
            prediction.roll_tensor(
                torch.ones(1, TOKENS), packed_seq_params=boundaries((0, 3, TOKENS), "cpu")
            )
        return mode.count

    before = reads()
    undo = fix_packs(MOST)
    after = reads()
    undo()
    assert before > 0 and after == 0
