"""Ways of sharding; Megatron-FSDP's hooks are recognised, and passed to TE in their phases."""
