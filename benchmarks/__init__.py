"""What graphs cost and save, measured: ``python -m benchmarks.overheads --help``."""
