"""Megatron-FSDP's bookkeeping once a bucket, where its own runs once a parameter.

Numbers stay the same to the last bit: the same values are copied to the same places, and
collectives come in Megatron-FSDP's own order; one gather a pass is left out
(``params/last_unit.py``).
``docs/fast_path.md`` says what each part replaces and what it saves.
"""

from megatron_cg.fastpath.install_parts import FastPath, install

__all__ = ["FastPath", "install"]
