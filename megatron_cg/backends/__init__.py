"""Capture backends: CUDA graphs by Transformer Engine or by torch, or a tape on the CPU."""

from megatron_cg.backends.base import Backend

__all__ = ["Backend"]
