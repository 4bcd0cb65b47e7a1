"""Metrics, tables, plots and pages of results."""
