"""Turns a launch line into one that trains with graphs, without a GPU; no model is built."""
