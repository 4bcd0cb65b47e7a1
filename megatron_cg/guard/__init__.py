"""What must hold for a replay: recorded at capture, compared before each one."""

from megatron_cg.guard.guard import Guard
from megatron_cg.guard.mismatch import Mismatch

__all__ = ["Guard", "Mismatch"]
