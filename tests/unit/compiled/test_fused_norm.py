"""RMSNorm is one operation in code for GPUs, as in an eager pass there."""

from __future__ import annotations

import pytest
import torch

from megatron_cg.compiled.region import Capability, Region
from megatron_cg.compiled.trace import Trace, _fused_norms_kept, trace


def traced(capability: Capability, dtype: torch.dtype = torch.float32) -> Trace:
    with torch.device("meta"):
        norm = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)).to(dtype)
        given = torch.randn(3, 2, 8, dtype=dtype, requires_grad=True)
    return trace(Region(norm, (given,)), 0, capability)


def operations(found: Trace, part: str) -> str:
    return "\n".join(map(str, found.code[part]))


def has_meta_kernel() -> bool:
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "Meta")
    return has


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_for_gpus_has_the_fused_kernel_in_both_passes(dtype: torch.dtype) -> None:
    before = has_meta_kernel()
    found = traced((9, 0), dtype)
    assert operations(found, "forward").count("aten._fused_rms_norm.default") == 1
    assert "rsqrt" not in operations(found, "forward")
    assert operations(found, "backward").count("aten._fused_rms_norm_backward.default") == 1
    assert has_meta_kernel() == before


def test_code_for_cpus_has_the_operations_that_run_there() -> None:
    assert "aten.rsqrt.default" in operations(traced(None), "forward")


def test_the_kernel_for_shapes_is_gone_after_an_error() -> None:
    before = has_meta_kernel()
    with pytest.raises(ArithmeticError), _fused_norms_kept():
        assert has_meta_kernel()
        raise ArithmeticError
    assert has_meta_kernel() == before


def test_the_shapes_are_those_of_torch() -> None:
    given, weight = torch.randn(3, 2, 4, 5), torch.ones(4, 5)
    expected = torch.ops.aten._fused_rms_norm(given, [4, 5], weight, None)
    with _fused_norms_kept():
        meta = torch.ops.aten._fused_rms_norm(given.to("meta"), [4, 5], weight.to("meta"), None)
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in expected]
