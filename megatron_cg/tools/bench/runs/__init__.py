"""Which runs a benchmark makes, how each is started, and where its results lie."""
