"""Turns a launch line into one that trains with graphs, without a GPU; no model is built.

``launch_line.py`` reads and writes lines, and ``settings.py`` reads their flags. ``edit.py``
changes lines until they are accepted and fit, by what ``layers.py`` and ``memory.py`` know of the
model. ``report.py`` prints.
"""
