"""What a hook is, and how hooks are taken off a module and put back exactly."""

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
