"""Transformer Engine's graphs."""
