"""``megatron-cg bench``: what graphs save, against what else people would run."""

INCOMPLETE = 3
"""The exit code where a measurement failed."""
