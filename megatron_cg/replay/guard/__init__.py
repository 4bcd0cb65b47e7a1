"""The rows of a graph's inputs and memory, and what they find; see ``replay/depends_on.py``."""

from megatron_cg.replay.guard.mismatch import Mismatch

__all__ = ["Mismatch"]
