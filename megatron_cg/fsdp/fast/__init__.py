"""Megatron-FSDP's bookkeeping once a bucket, where its own runs once a parameter.

Numbers stay the same to the last bit: the same values are copied to the same places, and every
collective, wait and free is Megatron-FSDP's own, in its own order. ``docs/fast_path.md`` says what
each part replaces and what it saves.
"""

from megatron_cg.fsdp.fast.path import FastPath, install

__all__ = ["FastPath", "install"]
