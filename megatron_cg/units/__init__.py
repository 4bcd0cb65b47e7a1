"""``graph_units``: CUDA graphs of any modules; nothing of megatron-core is imported."""
