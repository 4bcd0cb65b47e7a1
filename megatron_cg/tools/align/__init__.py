"""Runs the same training twice, eagerly and with graphs, and compares it bit for bit."""
