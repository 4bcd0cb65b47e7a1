"""Reads traces of torch.profiler: when the GPU was busy, and what it waited for. Pure."""
