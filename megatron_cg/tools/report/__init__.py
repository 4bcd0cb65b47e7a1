"""Converts records of runs to one readable page; see ``docs/start.md``."""
