"""``megatron-cg bench``: measures graphs against baselines."""

INCOMPLETE = 3
"""The exit code when a measurement failed."""
