"""Runs the same training twice, eagerly and with graphs, and compares it bit for bit."""

TRANSFORMER_ENGINE, NATIVE, TAPE = "transformer_engine", "native", "tape"
"""Values of ``--backend`` besides ``auto``."""
