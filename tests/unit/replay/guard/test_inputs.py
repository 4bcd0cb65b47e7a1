"""Single clauses on plain tensors, where a model on one CPU has no place for the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_cg.replay.guard.inputs import Inputs


def inputs() -> tuple[Inputs, tuple[torch.Tensor, ...], dict[str, Any]]:
    args, kwargs = (torch.ones(4, 2),), {"mask": torch.zeros(4, dtype=torch.bool)}
    return Inputs(args, kwargs), args, kwargs


def test_what_was_captured_is_allowed() -> None:
    whole, args, kwargs = inputs()
    steering = {"is_first_microbatch": True, "context": None}
    assert whole.broken(args, {**kwargs, **steering}) is None
    assert whole.copied(args, kwargs) == (2, 0, 0)
    assert whole.copied((torch.ones(4, 2),), kwargs) == (1, 1, 32)


@pytest.mark.parametrize(
    ("args", "kwargs", "clause", "words"),
    [
        ((torch.ones(4, 2, device="meta"),), {}, "device", "is meta now"),
        ((torch.ones(4, 3),), {}, "shape", "shape of argument hidden_states was (4, 2)"),
        ((torch.ones(2, 4).t(),), {}, "stride", "was (2, 1) at capture and is (1, 4) now"),
        ((torch.ones(4, 2).half(),), {}, "dtype", "torch.float16"),
        ((), {}, "structure", "the number of positional arguments was 1"),
        (None, {"mask": None}, "structure", "argument mask was a tensor at capture and is None"),
        (None, {"bias": torch.ones(3)}, "structure", "silently ignore this input"),
        (None, {"bias": 3}, "structure", "argument bias was not given at capture and is 3 now"),
        (("text",), {}, "structure", "A graph takes only tensors"),
    ],
)
def test_each_difference_is_named(args: Any, kwargs: Any, clause: str, words: str) -> None:
    whole, own_args, own_kwargs = inputs()
    found = whole.broken(own_args if args is None else args, {**own_kwargs, **kwargs})
    assert found is not None and found.clause == clause
    assert words in found.text("layer 3") and found.text("layer 3").startswith("layer 3: ")


def test_a_keyword_that_is_missing_is_named() -> None:
    whole, args, _ = inputs()
    found = whole.broken(args, {})
    assert found is not None and "argument mask was a tensor at capture and is missing" in (
        found.text("layer 0")
    )
