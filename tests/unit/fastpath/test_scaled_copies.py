"""Gradients that are scaled while they are copied: which ones, and the bits of the kernel."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.fastpath.part import NotApplicableError
from megatron_cg.fastpath.scaled_copies import ScaledCopies, factor_of, require_kernel
from tests.unit.interpreted import last_line_of

WRITES = """
import json
from itertools import product

import torch
from megatron_cg.fastpath import gradient_kernels
from megatron_cg.fastpath.gradient_kernels import Table

torch.manual_seed(0)
gradient_kernels._CHUNK, gradient_kernels._BLOCK = 8192, 4096
found = {}
dtypes = torch.float16, torch.float32
aligned, others = [(64, 128), (72, 128), (1 << 16,)], [(7, 5), (3,), (9001,)]
for dtype, shapes, sums in product(dtypes, (aligned, others), (0, 1)):
    targets, sources = ([torch.randn(s).mul(by).to(dtype) for s in shapes] for by in (1, 3e-3))
    for target, source in zip(targets, sources):
        source.view(-1)[:1] = torch.inf
        source.view(-1)[1::7], target.view(-1)[1::7] = -0.0, 0.0
        target.view(-1)[2::5] = torch.finfo(dtype).tiny
    expected = [target.clone() for target in targets]
    for target, source in zip(expected, sources):
        (target.add_ if sums else target.copy_)(source).mul_(1 / 3)
    Table(targets, sources).write(targets, 1 / 3, sums=bool(sums))
    found[f"{dtype} {shapes} {sums}"] = all(
        torch.equal(target.view(torch.uint8), same.view(torch.uint8))
        for target, same in zip(targets, expected)
    )
print(json.dumps(found))
"""
"""Triton's interpreter cuts float32 to bfloat16 without rounding, so that is tested on a GPU."""


def test_the_kernel_has_the_bits_of_a_copy_or_an_addition_and_a_multiplication() -> None:
    found = json.loads(last_line_of(WRITES))
    assert len(found) == 8 and all(found.values()), found


def test_a_kernel_that_cannot_run_leaves_the_part_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: Any, **__: Any) -> bool:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(ScaledCopies, "copy", copy)
    require_kernel(torch.ones(1))
    on_gpu: Any = SimpleNamespace(is_cuda=True, new_zeros=torch.zeros)
    with pytest.raises(NotApplicableError, match=r"^Triton .*C compiler"):
        require_kernel(on_gpu)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_cpu_too_the_factor_is_not_rounded(dtype: torch.dtype, sums: bool) -> None:
    torch.manual_seed(0)
    pieces, gradients = ([torch.randn(n).to(dtype) for n in (1, 7, 300)] for _ in "pg")
    expected = [piece.clone() for piece in pieces]
    for target, source in zip(expected, gradients, strict=True):
        (target.add_ if sums else target.copy_)(source).mul_(1 / 3)
    assert ScaledCopies().copy(pieces, gradients, 1 / 3, sums=sums)
    assert all(map(torch.equal, pieces, expected))


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, 0.5),
        ({"average_in_collective": True}, None),
        ({"dtype": torch.float32}, None),
        ({"dtype": torch.float32, "gradient_reduce_div_fusion": False}, 0.5),
        ({"dtype": torch.float64, "gradient_reduce_div_fusion": False}, None),
        ({"comm": torch.float32}, None),
        ({"comm": torch.float32, "sharded": True}, 0.5),
        ({"group": [0, 1]}, None),
        ({"factor": None}, None),
    ],
    ids=str,
)
def test_a_bucket_is_scaled_here_only_if_megatron_fsdp_would_multiply_it(
    change: dict[str, Any], factor: float | None
) -> None:
    config = SimpleNamespace(
        average_in_collective=change.get("average_in_collective", False),
        gradient_reduce_div_fusion=change.get("gradient_reduce_div_fusion", True),
    )
    buffer = SimpleNamespace(
        ddp_config=config,
        is_data_distributed=change.get("sharded", False),
        gradient_scaling_factor=change.get("factor", 0.5),
    )
    policy = SimpleNamespace(grad_comm_dtype=change.get("comm"))
    store = SimpleNamespace(mp_policy=policy, bucket_to_bucket_group={0: change.get("group", [0])})
    assert factor_of(store, 0, buffer, change.get("dtype", torch.bfloat16)) == factor
