"""Pools of graph memory, and what is released for a capture."""
