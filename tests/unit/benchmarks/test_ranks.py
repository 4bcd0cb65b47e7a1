"""Host time is measured for more ranks than there are processes."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.ranks import LAYOUTS, measure


def test_one_process_stands_for_many_ranks() -> None:
    assert (64, 64) in LAYOUTS
    eager, fast = measure(64, 64, steps=1)
    assert eager > 0 and fast > 0
    assert not dist.is_initialized()
