"""The conditions of a replay: recorded at capture, checked before each replay."""

from megatron_cg.replay.guard.guard import Guard
from megatron_cg.replay.guard.mismatch import Mismatch

__all__ = ["Guard", "Mismatch"]
