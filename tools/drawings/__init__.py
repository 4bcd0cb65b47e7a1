"""The drawings of the documentation, made from data: ``python -m tools.drawings`` writes them."""
