"""Megatron-FSDP's bookkeeping, run once per bucket instead of once per parameter.

Results are bitwise identical: the same values are copied to the same places, and collectives keep
Megatron-FSDP's order. ``docs/fast_path.md`` lists what each part replaces.
"""

from megatron_cg.fastpath.install_parts import FastPath, install, install_under_v2

__all__ = ["FastPath", "install", "install_under_v2"]
