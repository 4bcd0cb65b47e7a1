"""Code compiled once, in one process without a GPU, and loaded by every rank.

``save`` traces a region on the meta device as several ranks of a ``fake`` process group, and writes
the code with a manifest. ``load`` checks the manifest, gives the code this rank's device and
process groups, compares one step with eager, and lets all ranks decide together.
"""
