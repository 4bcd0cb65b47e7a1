"""Measurements of one thing that no command makes, and the results of earlier runs."""
