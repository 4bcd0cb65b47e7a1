"""Gradients that are scaled while they are copied: which ones, and the bits of the kernel."""

import json
from collections import defaultdict
from typing import Any

import pytest
import torch

from megatron_cg.fastpath.scaled_copies import factor_of, runs_of
from tests.unit.interpreted import last_line_of

SUMS = """
import json
from itertools import product

import torch
from megatron_cg.fastpath.gradient_kernels import write_scaled

torch.manual_seed(0)
found = {}
cases = ((5000, 0.5), (4096, 1 / 3), (1, 0.25), (33, 1.0))
for dtype, (count, factor), sums in product((torch.float16, torch.float32), cases, (0, 1)):
    # The kernel gets the first of several tensors without a gap, and what is behind them stays.
    target, source = (torch.randn(count + 9).mul(scale).to(dtype) for scale in (1, 3e-3))
    source[:1] = torch.inf
    source[1::7], target[1::7] = -0.0, 0.0
    target[2::5] = torch.finfo(dtype).tiny
    expected = target.clone()
    (expected.add_ if sums else expected.copy_)(source).mul_(factor)
    expected[count:] = target[count:]
    write_scaled(target[:1], source[:1], factor, count, sums=bool(sums))
    found[f"{dtype} {count} {sums}"] = torch.equal(
        target.view(torch.uint8), expected.view(torch.uint8)
    )
print(json.dumps(found))
"""
"""Memory of one process, which Triton's interpreter works on; it is chosen before an import.

It cuts float32 to bfloat16 without rounding, so that is tested on a GPU.
"""


def test_the_kernel_has_the_bits_of_a_copy_or_an_addition_and_a_multiplication() -> None:
    found = json.loads(last_line_of(SUMS))
    assert len(found) == 16 and all(found.values()), found


def pieces(*sizes: int, dtype: torch.dtype = torch.bfloat16, gap: int = 0) -> list[torch.Tensor]:
    storage = torch.arange(sum(sizes) + gap * len(sizes)).to(dtype)
    made, begin = [], 0
    for size in sizes:
        made.append(storage[begin : begin + size].view(2, -1))
        begin += size + gap
    return made


def test_what_is_apart_or_of_another_dtype_is_left_to_megatron_fsdp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(runs_of(pieces(4, 4, gap=2), pieces(4, 4)) or ()) == 2
    assert runs_of(pieces(*[4] * 5, gap=1), pieces(*[4] * 5)) is None
    assert runs_of(pieces(4, 4), pieces(4, 4, dtype=torch.float32)) is None
    assert runs_of(pieces(4, 4), [p.t() for p in pieces(4, 4)]) is None
    apart = [piece.clone() for piece in pieces(4, 4)]
    assert len(runs_of(pieces(4, 4), apart) or ()) == 2
    monkeypatch.setattr("megatron_cg.fastpath.scaled_copies._WORTH_A_LAUNCH", pieces(4)[0].nbytes)
    assert len(runs_of(pieces(*[4] * 5, gap=1), pieces(*[4] * 5)) or ()) == 5
    assert runs_of(pieces(4, 4, 4, 4, 2, gap=1), pieces(4, 4, 4, 4, 2)) is None


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, 0.5),
        ({"average_in_collective": True}, None),
        ({"dtype": torch.float32}, None),
        ({"dtype": torch.float32, "gradient_reduce_div_fusion": False}, 0.5),
        ({"dtype": torch.float64, "gradient_reduce_div_fusion": False}, None),
        ({"grad_comm_dtype": torch.float32}, None),
        ({"grad_comm_dtype": torch.float32, "is_data_distributed": True}, 0.5),
        ({"bucket_to_bucket_group": defaultdict(lambda: [0, 1])}, None),
        ({"gradient_scaling_factor": None}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_bucket_is_scaled_here_only_if_megatron_fsdp_would_multiply_it(
    change: dict[str, Any], factor: float | None, dense_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dense_model.module.param_and_grad_buffer
    groups = enumerate(store.parameter_groups)
    number, buffer = next((n, g.main_grad_buffer) for n, g in groups if g.main_grad_buffer)
    given = {"gradient_scaling_factor": 0.5, "gradient_reduce_div_fusion": True, **change}
    dtype = given.pop("dtype", torch.bfloat16)
    for name, value in given.items():
        owners = (buffer, buffer.ddp_config, store, store.mp_policy)
        owner = next(owner for owner in owners if hasattr(owner, name))
        monkeypatch.setitem(vars(owner), name, value)
    assert factor_of(store, number, buffer, dtype) == factor
