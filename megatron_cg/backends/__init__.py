"""Capture backends: CUDA graphs by Transformer Engine, or a tape on the CPU."""

from megatron_cg.backends.base import Backend, GraphedCallable

__all__ = ["Backend", "GraphedCallable"]
