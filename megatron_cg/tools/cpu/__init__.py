"""The real Megatron-FSDP trained without a GPU: stand-ins, a model, a loop, its processes."""
