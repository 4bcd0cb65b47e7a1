"""Records of hooks, and snapshots that remove a module's hooks and restore them exactly."""

from megatron_cg.hooks.hook_records import HookKind, HookRecord, describe, module_hooks
from megatron_cg.hooks.snapshot import HookSnapshot, ParameterHookSnapshot

__all__ = [
    "HookKind",
    "HookRecord",
    "HookSnapshot",
    "ParameterHookSnapshot",
    "describe",
    "module_hooks",
]
