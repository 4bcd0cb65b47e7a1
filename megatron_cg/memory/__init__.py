"""Memory of graphs: its pools, its use between steps, and what is freed for a capture."""
