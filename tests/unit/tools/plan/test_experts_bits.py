"""What ``plan`` says of the bits of torch's grouped GEMM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_cg.tools.plan.experts import bits_note


@pytest.mark.parametrize(
    ("sizes", "terms", "equal"),
    [
        ({"hidden_size": 2048, "moe_ffn_hidden_size": 768, "swiglu": True}, "2,048", True),
        ({"hidden_size": 2048, "moe_ffn_hidden_size": 1408, "swiglu": True}, "2,816", False),
        ({"hidden_size": 2048, "moe_ffn_hidden_size": 1408, "swiglu": False}, "2,048", True),
        ({"hidden_size": 4096, "moe_ffn_hidden_size": 512, "swiglu": True}, "4,096", False),
    ],
)
def test_the_longest_sum_decides(sizes: dict[str, Any], terms: str, equal: bool) -> None:
    note = bits_note(SimpleNamespace(**sizes))
    assert f"longest sum has {terms} terms" in note
    assert ("had the bits of Transformer Engine's default" in note) == equal
    assert "--cg-grouped-gemm torch too has equal bits" in note
