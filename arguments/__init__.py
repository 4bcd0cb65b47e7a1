"""The flags and settings of a run with layerwise CUDA graphs, and the rules for them.

``megatron.py`` adds the flags to Megatron's parser and checks its namespace. Everything else here
is pure and imports neither torch nor Megatron.
"""

from megatron_cg.arguments.layers import LayerSelection
from megatron_cg.arguments.schema import Environment, GraphArguments, RunArguments
from megatron_cg.arguments.validation import notices, violations

__all__ = [
    "Environment",
    "GraphArguments",
    "LayerSelection",
    "RunArguments",
    "notices",
    "violations",
]
