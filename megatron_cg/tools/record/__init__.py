"""The record of a run: written step by step, read by ``align``."""
