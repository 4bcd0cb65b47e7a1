"""One step of a captured region: guard, replay, or the same region eagerly."""
