"""CUDA graphs by torch alone."""
