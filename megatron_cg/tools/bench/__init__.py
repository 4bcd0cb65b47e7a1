"""``megatron-cg bench``: runs a training with and without graphs, and compares Megatron's logs."""

from megatron_cg.errors import MegatronCGError


class BenchError(MegatronCGError):
    """A benchmark cannot be made as asked."""
