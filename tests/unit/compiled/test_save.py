"""A rank that does not exist leaves nothing behind in this process."""

from __future__ import annotations

import torch

from megatron_cg.compiled.save import fake_rank
from megatron_cg.tools.cpu.fakes import cpu_fakes


def test_a_dispatcher_keeps_no_stream_of_a_rank_that_does_not_exist() -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    before = MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
    with fake_rank(0, 2, None):
        # As a dispatcher does when it is the first of its process.
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cuda.Stream()
    assert MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = before


def test_the_meta_device_is_a_context_after_the_cpu_fakes() -> None:
    with cpu_fakes(), torch.device("meta"):
        torch.randn(2)
    with torch.device("meta"):
        assert torch.randn(2).device.type == "meta"
