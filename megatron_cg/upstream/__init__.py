"""Code of other packages: what we rely on, and what we patch."""
