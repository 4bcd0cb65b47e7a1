"""Fakes of Transformer Engine and mamba-ssm, for machines that have neither a GPU nor them."""
