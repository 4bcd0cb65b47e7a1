"""The same training twice, eagerly and with graphs, compared bit for bit."""

TRANSFORMER_ENGINE, TAPE = "transformer_engine", "tape"
"""What ``--backend`` takes beside ``auto``."""
