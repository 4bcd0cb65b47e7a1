"""``megatron-cg doctor``: checks a machine before a run.

``checks.py`` lists the checks, one topic per module: versions, symbols, environment, libraries,
modules, machine. A check is a function from a ``System`` (``system.py``) to findings. Facts that
need an import or a loaded library come from another process (``ask.py``, ``probe.py``), because the
import of a broken package can crash its process.
"""
