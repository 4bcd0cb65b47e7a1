"""``megatron-cg doctor``: what prevents CUDA graphs on a machine, and what to type."""
