"""``--recompute-granularity full`` with graphs."""
