"""The command ``megatron-cg``."""
