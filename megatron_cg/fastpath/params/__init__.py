"""Unsharding and gathering parameters."""
