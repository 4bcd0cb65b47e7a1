"""Gradients on their way into the buckets that are reduced."""
