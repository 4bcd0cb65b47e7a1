"""Gradient bucketing, and weights detached from autograd."""
