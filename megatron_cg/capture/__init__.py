"""Captures the graphs of a model as one transaction."""
