"""Trains with the real Megatron-FSDP without a GPU: fakes, a model, a loop, its processes."""
