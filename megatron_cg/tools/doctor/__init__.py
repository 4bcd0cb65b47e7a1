"""``megatron-cg doctor``: what prevents CUDA graphs on a machine, and what to type.

Another process (``probe.py``) imports and loads what a run would, because a broken package can end
the process that imports it. A check is a function from its answers, in a ``System``, to findings.
"""
