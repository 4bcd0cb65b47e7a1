"""The few patches to Megatron. Each can be undone and names its symbol and version."""
