"""``megatron-cg bench``: measures graphs against baselines."""

from megatron_cg.errors import MegatronCGError

INCOMPLETE = 3
"""The exit code when a measurement failed."""


class BenchError(MegatronCGError):
    """A benchmark cannot be made as asked, or a file is not what it should be."""
