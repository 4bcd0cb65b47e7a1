"""The real Megatron-FSDP trained without a GPU: fakes, a model, a loop, its processes."""
