"""Units that take a BlockMask: a new one each step, with other documents, goes into the graph."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from megatron_cg.units.call import CallSpec
from tests.unit.units.plain import REPLAYED, ROWS, Training, Unit, assert_as_eager, backward, units

X = torch.ones(2)
LATEST = torch.tensor(3)
LIMITS = SimpleNamespace(size=3)
SIZE = 3


class Attention(Unit):
    """Reads the function of a block mask, and a tensor of it."""

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:  # type: ignore[override]
        q = self.linear(x)[None, None]
        allowed = create_mask(mask.mask_mod, 1, 1, ROWS, ROWS, device="cpu")
        attended = scaled_dot_product_attention(q, q, q, attn_mask=allowed)[0, 0]
        out: torch.Tensor = x + attended * mask.kv_num_blocks.sum()
        return out


def causal(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return q >= k


def until_latest(_b: Any, _h: Any, q: Any, _k: Any) -> Any:
    return q <= LATEST


def window(size: Any) -> Any:
    return lambda _b, _h, q, k: q - k < size


def mask(*functions: Any, block: int = 2) -> BlockMask:
    function = and_masks(*functions) if len(functions) > 1 else functions[0]
    return create_block_mask(function, None, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=block)


def documents(ids: torch.Tensor) -> Any:
    """A ``mask_mod`` as packed documents have: a token sees its own document."""
    return lambda _b, _h, q, k: ids[q] == ids[k]


def train(run: Training, x: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(ROWS) > run.step % ROWS
    made = mask(causal, documents(ids), window(3))
    for layer in run.model:
        x = layer(x, made)
    return backward(x.square().mean())


def test_other_documents_in_each_step_are_replayed() -> None:
    assert_as_eager({"replayed": REPLAYED, "mismatched": 0}, partial(units, Attention), train)


DOCUMENTS = documents(torch.zeros(ROWS))


@pytest.mark.parametrize(
    ("one", "other", "subject"),
    [
        (mask(causal, window(2)), mask(causal, window(2)), None),
        (mask(causal, DOCUMENTS), mask(causal, documents(torch.ones(ROWS))), None),
        (mask(causal, window(2)), mask(causal, window(3)), "x[1].mask_mod.mask_mods[1].size"),
        (mask(causal, window(2)), mask(window(2), causal), "x"),
        (mask(causal), mask(causal, block=4), "x[1].BLOCK_SIZE[0]"),
        (mask(causal), None, "x"),
    ],
)
def test_another_mask_has_other_tensors_alone(one: Any, other: Any, subject: str | None) -> None:
    form = CallSpec.of(nn.Identity().forward, ((X, one),), {})
    assert form.problems() == []
    mismatch = form.split(((X, other),), {})[1]
    assert (mismatch.subject if mismatch is not None else None) == (
        None if subject is None else f"argument {'input' + subject[1:]}"
    )


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (window(object()), "mask.mask_mod.size is <object"),
        (partial(causal), "mask.mask_mod is functools.partial"),
        (until_latest, "mask.mask_mod.LATEST (global) is <class 'torch.Tensor'>"),
        (
            lambda *at: ~until_latest(*at),
            "mask.mask_mod.until_latest (global).LATEST (global) is <class 'torch.Tensor'>",
        ),
        (lambda *at: ~DOCUMENTS(*at), "mask.mask_mod.DOCUMENTS (global) is <class 'function'>"),
        (lambda *_: LIMITS.size, "mask.mask_mod.LIMITS (global) is <class 'types.Simple"),
    ],
)
def test_what_would_be_read_where_it_was_at_capture_is_refused(function: Any, found: str) -> None:
    made = mask(causal)
    made.mask_mod = function
    (problem,) = CallSpec.of(Attention().forward, (X, made), {}).problems()
    assert problem.startswith(f"argument {found}")


def test_a_global_number_that_changed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mask(lambda _b, _h, q, k: q - k < SIZE)
    form = CallSpec.of(Attention().forward, (X, made), {})
    assert form.problems() == []
    assert form.split((X, made), {})[1] is None
    monkeypatch.setitem(globals(), "SIZE", 4)
    mismatch = form.split((X, made), {})[1]
    assert mismatch is not None
    assert mismatch.subject == "argument mask.mask_mod.SIZE (global)"
