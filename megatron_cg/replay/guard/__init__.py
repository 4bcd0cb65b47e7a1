"""What must hold for a replay: recorded at capture, compared before each one."""

from megatron_cg.replay.guard.guard import Guard
from megatron_cg.replay.guard.mismatch import Mismatch

__all__ = ["Guard", "Mismatch"]
