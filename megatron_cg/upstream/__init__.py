"""Contact with code that is not ours: what is relied on, and what is patched."""
