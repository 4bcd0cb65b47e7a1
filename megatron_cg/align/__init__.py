"""The same training twice, eagerly and with graphs, compared bit for bit."""
