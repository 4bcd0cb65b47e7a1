"""Who drives a session: Megatron, or a training loop of the user."""
