"""A recording of ATen operations, for machines without a GPU."""
