"""``megatron-cg bench``: runs a training with and without graphs, and compares Megatron's logs."""
