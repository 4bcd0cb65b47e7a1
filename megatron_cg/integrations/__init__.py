"""Connects graph sessions to Megatron, or to a user's own training loop."""
