"""What other backends need of Transformer Engine where the model has loaded it. Imports no TE."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron_cg.upstream.symbols import Symbol

GRAPH = "transformer_engine.pytorch.graph"
FP8 = "transformer_engine.pytorch.quantization:FP8GlobalStateManager"
START_CAPTURING = Symbol(f"{GRAPH}:set_capture_start", "a setter of TE's capturing flag")
IS_CAPTURING = Symbol(f"{GRAPH}:is_graph_capturing", "a query of TE's capturing flag")
END_CAPTURING = Symbol(f"{GRAPH}:set_capture_end", "a setter of TE's capturing flag")
RNG_STATES = Symbol(
    "transformer_engine.pytorch.distributed:get_all_rng_states",
    "the generators of TE's RNG tracker",
)
FP8_ENABLED = Symbol(f"{FP8}.is_fp8_enabled", "whether quantization is on")
FP8_RECIPE = Symbol(f"{FP8}.get_fp8_recipe", "the recipe in use")
_ATTENTION = Symbol(
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    ":_attention_backends",
    "which kernel computes attention",
)
RELIES_ON = (
    *(START_CAPTURING, IS_CAPTURING, END_CAPTURING, RNG_STATES, FP8_ENABLED, FP8_RECIPE),
    _ATTENTION,
)
UPGRADE = "pip install 'nvidia-cublas>=13.8.1'"
"""Of CUDA 13. Torch 2.11 pins an older one, and pip warns."""
INSTALL = (
    "pip install setuptools wheel ninja pybind11 && pip install --no-build-isolation "
    "'transformer-engine[core_cu13,pytorch]==2.20.2'"
)
"""TE is compiled against the installed torch: requirements/gpu-build.txt."""
NOT_LOADED = "Transformer Engine is not loaded"


def fp8_recipe() -> Any:
    """TE's recipe where TE is loaded and FP8 is on now, else None."""
    if is_loaded(FP8_ENABLED) and FP8_ENABLED.find()():
        return FP8_RECIPE.find()()
    return None


def rng_states() -> dict[str, Any]:
    return dict(RNG_STATES.find()()) if is_loaded(RNG_STATES) else {}


def fuses_attention() -> bool:
    """Whether cuDNN computed TE's last attention; also true where none of TE's is loaded."""
    return not is_loaded(_ATTENTION) or bool(_ATTENTION.find()["use_fused_attention"])


@contextmanager
def told_of_capture() -> Iterator[None]:
    """TE's modules take their paths for CUDA graphs in the block; nothing where none is loaded."""
    with ExitStack() as undo:
        if is_loaded(IS_CAPTURING) and not IS_CAPTURING.find()():
            START_CAPTURING.find()()
            undo.callback(END_CAPTURING.find())
        yield


def is_loaded(symbol: Symbol) -> bool:
    return symbol.path.partition(":")[0] in sys.modules
