"""Host time is measured for more ranks than there are processes."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.ranks import EXPERTS, measure


def test_one_process_stands_for_many_ranks() -> None:
    found = measure(64, 16, steps=1)
    assert found.eager > 0 and found.fast > 0
    assert {"gathers", "unshard", "gradients"} <= set(found.parts)
    assert found.experts == EXPERTS // 16
    assert not dist.is_initialized()
