"""Layerwise CUDA graphs under Megatron-FSDP, bit for bit, on released packages.

``torchrun ... -m megatron_cg pretrain_gpt.py ...`` runs an unchanged Megatron script.
:func:`enable` does the same from inside a script, before its arguments are parsed. A custom
training loop calls it too, before it creates megatron-core's ``TECudaGraphHelper``, or uses
:func:`graph_units` for a model of another kind. :func:`compile_together` lets all ranks decide
together at the guards of ``torch.compile``. All of them import torch; ``import megatron_cg`` alone
does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_cg.errors import CaptureError, ConfigurationError, MegatronCGError
from megatron_cg.extensions import needed_by
from megatron_cg.version import __version__ as __version__

if TYPE_CHECKING:
    from megatron_cg.compiled.together import compile_together
    from megatron_cg.integrations.megatron.patches import counters, disable, enable
    from megatron_cg.units.graphs import GraphedUnits, graph_units

__all__ = [
    "CaptureError",
    "ConfigurationError",
    "GraphedUnits",
    "MegatronCGError",
    "compile_together",
    "counters",
    "disable",
    "enable",
    "graph_units",
]

_LATER = {
    "GraphedUnits": "megatron_cg.units.graphs",
    "compile_together": "megatron_cg.compiled.together",
    "counters": "megatron_cg.integrations.megatron.patches",
    "disable": "megatron_cg.integrations.megatron.patches",
    "enable": "megatron_cg.integrations.megatron.patches",
    "graph_units": "megatron_cg.units.graphs",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at first access."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(name):
        value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
