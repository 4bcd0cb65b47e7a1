"""Capture backends: CUDA graphs by Transformer Engine or by torch, or a tape on the CPU."""
