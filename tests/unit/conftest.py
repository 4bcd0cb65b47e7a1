"""What the unit tests share: one process, the real Megatron-FSDP on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone, under the CPU stand-ins."""
    from megatron.core import parallel_state

    from megatron_cg.cpu.standins import cpu_standins

    with cpu_standins():
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


@pytest.fixture
def dense_model(one_rank: None) -> Any:
    """A real GPTModel under megatron-core's FSDP, with attention and MLP as graph scopes."""
    from megatron_cg.cpu.model import CpuModelConfig, build

    return build(CpuModelConfig(layers=2, graph_modules=("attn", "mlp")))
