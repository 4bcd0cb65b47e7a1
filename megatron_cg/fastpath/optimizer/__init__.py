"""The optimizer's step on shards."""
