"""``megatron-cg bench``: what graphs save, against what else people would run."""
