"""Megatron-FSDP's bookkeeping, run once per bucket instead of once per parameter.

Results are bitwise identical: the same values are copied to the same places, and collectives keep
Megatron-FSDP's order. ``docs/fast_path.md`` lists what each part replaces.
"""
