"""Runs the same training twice, eagerly and with graphs, and compares it bit for bit."""

TRANSFORMER_ENGINE, TAPE = "transformer_engine", "tape"
"""Values of ``--backend`` besides ``auto``."""
