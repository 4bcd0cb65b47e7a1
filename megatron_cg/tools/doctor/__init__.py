"""What ``megatron-cg doctor`` finds on a machine before a run is started on it.

``checks.py`` lists the checks, one idea a module: versions, symbols, environment, libraries,
modules, machine. A check is a function from a ``System`` (``system.py``), the place that is looked
at, to findings. What must be imported or loaded to be known is asked of another
process (``ask.py``, ``probe.py``), since importing a broken package can end the one that does it.
"""
