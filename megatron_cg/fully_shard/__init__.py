"""Models on whose modules ``fully_shard`` was called: torch's FSDP2 and Megatron-FSDP v2."""
