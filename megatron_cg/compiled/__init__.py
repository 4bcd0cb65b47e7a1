"""``torch.compile`` on all ranks together."""
