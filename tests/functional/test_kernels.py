"""Bits of kernels that Triton's interpreter does not have."""

from itertools import product

import pytest
import torch

from megatron_cg.fastpath.scaled_copies import ScaledCopies, require_kernel
from tests.functional.conftest import skip_without

SHAPES = {"aligned": [(64, 128), (72, 128), (1 << 17,)], "others": [(7, 5), (3,), (40001,)]}
SPECIAL = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scaled_copy_is_a_copy_or_an_addition_and_a_multiplication(
    dtype: torch.dtype, shapes: str
) -> None:
    skip_without(gpus=1)
    torch.manual_seed(0)
    require_kernel(torch.ones(1, dtype=dtype, device="cuda"))
    scaled, device = ScaledCopies(), torch.device("cuda")
    # One in three is below the smallest normal number, before or after it is scaled.
    scales = torch.tensor([1.0, 3e-3, torch.finfo(dtype).tiny], device=device)
    for sums, factor in product((False, True), (0.5, 1 / 3, 1.0)):
        bucket, gradients = (
            [torch.empty(s, dtype=dtype, device=device) for s in SHAPES[shapes]] for _ in "bg"
        )
        for tensor in (*bucket, *gradients):
            values = torch.randn(tensor.numel(), device=device)
            values *= scales[torch.randint(3, values.shape, device=device)]
            places = torch.randint(len(values), (len(SPECIAL),), device=device)
            values[places] = SPECIAL.to(device)
            tensor.copy_(values.view(tensor.shape))
        expected = [tensor.clone() for tensor in bucket]
        for target, source in zip(expected, gradients, strict=True):
            (target.add_ if sums else target.copy_)(source).mul_(factor)
        assert scaled.copy(bucket, gradients, factor, sums=sums)
        for written, same in zip(bucket, expected, strict=True):
            assert torch.equal(written.view(torch.uint8), same.view(torch.uint8))
