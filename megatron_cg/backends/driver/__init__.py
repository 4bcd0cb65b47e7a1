"""Warmup, capture and replay of modules, over any way of recording a pass."""
