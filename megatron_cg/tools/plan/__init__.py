"""Turns a launch line into one that trains with graphs, without a GPU; no model is built.

``launch_line.py`` reads and writes lines, and ``settings.py`` their flags. ``edit.py`` edits lines
until they fit, by what ``layers.py`` and ``memory.py`` know of the model. ``report.py`` prints.
"""
