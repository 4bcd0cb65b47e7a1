"""Layerwise CUDA graphs under Megatron-FSDP, bit for bit, on released packages.

``torchrun ... -m megatron_cg pretrain_gpt.py ...`` runs an unchanged Megatron script;
:func:`enable` does the same from inside a script, before its arguments are parsed.
"""

from megatron_cg.errors import CaptureError, ConfigurationError, MegatronCGError

__version__ = "0.1.0"
__all__ = ["CaptureError", "ConfigurationError", "MegatronCGError", "disable", "enable"]


def enable() -> None:
    """Make partial CUDA graphs work under Megatron-FSDP; see ``megatron.patches.enable``."""
    from megatron_cg.megatron.patches import enable as enable_patches

    enable_patches()


def disable() -> None:
    """Release all graphs and undo :func:`enable`; see ``megatron.patches.disable``."""
    from megatron_cg.megatron.patches import disable as disable_patches

    disable_patches()
