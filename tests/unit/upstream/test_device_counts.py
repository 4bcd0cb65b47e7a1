"""What Transformer Engine's grouped GEMM lacks to read counts on the device."""

import functools
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cg.upstream.te import NOT_LOADED, lacks_device_counts

HOPPER, BLACKWELL = (9, 0), (10, 0)


class Old:
    def __init__(self, num_gemms: int) -> None: ...


class New:
    def __init__(self, num_gemms: int, use_grouped_tensor: bool = False) -> None: ...


class Wrapped(New):
    __init__: Any = functools.wraps(New.__init__)(lambda *_args, **_named: None)


@pytest.mark.parametrize(
    ("layer", "cublas", "gpu", "missing"),
    [
        (Old, 131000, HOPPER, "transformer-engine is .*, before 2.19"),
        (New, 130700, HOPPER, "cuBLASLt is 13.7.0, before 13.8.1"),
        (New, 131000, None, "no GPU is visible"),
        (New, 131000, BLACKWELL, "the GPU is B, and Hopper alone was tried"),
        (New, 130801, HOPPER, "$"),
        (Wrapped, 130801, HOPPER, "$"),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, layer: Any, cublas: int, gpu: Any, missing: str
) -> None:
    of_te = SimpleNamespace(
        GroupedLinear=layer, tex=SimpleNamespace(get_cublasLt_version=lambda: cublas)
    )
    name = "transformer_engine.pytorch.module.grouped_linear"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert lacks_device_counts() == NOT_LOADED
    monkeypatch.setitem(sys.modules, name, of_te)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B")
    assert re.match(missing, lacks_device_counts())
