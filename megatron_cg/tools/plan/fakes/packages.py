"""Installs the fakes under the names ``transformer_engine`` and ``mamba_ssm``.

Only in a separate process (``worker.py``) and before Megatron is imported, because Megatron's
classes derive from TE's when they are defined. The fakes are installed whether or not the packages
exist, so a plan is the same on every machine.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cpu.grouped_linear import _GroupedLinear
from megatron_cg.tools.plan.fakes import functions, mamba
from megatron_cg.tools.plan.fakes import te_modules as modules
from megatron_cg.tools.plan.trace import compiled
from megatron_cg.upstream.patch import set_attribute

TE_VERSION = "2.20.2"
MAMBA_VERSION = "2.3.2"
_TE = "transformer_engine"
_NAMES = (_TE, "mamba_ssm", "causal_conv1d")
_GRAPH_FUNCTIONS = (
    "make_graphed_callables",
    "restore_fp8_tensors",
    "save_fp8_tensors",
    "set_capture_end",
    "set_capture_start",
)
_FUSED_ROUTERS = (
    "fused_topk_with_score_function",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
)


def install() -> Callable[[], None]:
    """Install the fakes in ``sys.modules``; returns the undo.

    Raises MegatronCGError if Megatron is already imported.
    """
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise MegatronCGError(
            "Megatron is imported already, so a plan cannot be made in this process; use "
            "megatron_cg.tools.plan.process, which starts another one."
        )
    with ExitStack() as undo:
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
        undo.callback(sys.modules.update, taken)
        for name, contents in _contents().items():
            module = types.ModuleType(name)
            # Code that checks whether a package exists asks for its spec.
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            vars(module).update(contents)
            sys.modules[name] = module
            undo.callback(sys.modules.pop, name, None)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        # Before the import of Megatron, which compiles its fused functions at import.
        undo.callback(set_attribute(torch, "compile", compiled))
        # An installed package would be used only in part; without it Megatron uses torch's
        # convolution.
        sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
        undo.callback(sys.modules.pop, "causal_conv1d", None)
        return undo.pop_all().close


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in _NAMES


def _contents() -> dict[str, dict[str, Any]]:
    """Every module by name, parents first, with the attributes that Megatron reads."""
    return {
        _TE: {"__version__": TE_VERSION},
        **{f"{_TE}.{name}": attributes for name, attributes in _of_te().items()},
        "mamba_ssm": {"__version__": MAMBA_VERSION},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": mamba.RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba.mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba.mamba_split_conv1d_scan_combined,
        },
    }


def _of_te() -> dict[str, dict[str, Any]]:
    """The modules below Transformer Engine."""
    return {
        "common": {},
        "common.recipe": {"DelayedScaling": _Recipe, "Format": _Recipe, "Recipe": _Recipe},
        "pytorch": {
            "Linear": modules.Linear,
            "LayerNormLinear": modules.LayerNormLinear,
            "GroupedLinear": modules.GroupedLinear,
            "LayerNorm": modules.LayerNorm,
            "RMSNorm": modules.RMSNorm,
            "DotProductAttention": modules.DotProductAttention,
            "fp8_model_init": _no_context,
            "quantized_model_init": _no_context,
            "autocast": _no_context,
        },
        "pytorch.fp8": {
            "FP8GlobalStateManager": FP8GlobalStateManager,
            "fp8_autocast": _no_context,
            "fp8_model_init": _no_context,
        },
        "pytorch.tensor": {"QuantizedTensor": _QuantizedTensor},
        "pytorch.ops": {"__getattr__": _absent_operation},
        "pytorch.module": {},
        "pytorch.module.base": {"TransformerEngineBaseModule": modules.TransformerEngineBaseModule},
        "pytorch.module.grouped_linear": {"_GroupedLinear": _GroupedLinear},
        "pytorch.distributed": {
            "CudaRNGStatesTracker": modules.CudaRNGStatesTracker,
            "activation_recompute_forward": _no_context,
            "is_fp8_activation_recompute_enabled": lambda: False,
            "checkpoint": _absent("activation checkpoints of TE"),
            "get_all_rng_states": dict,
        },
        "pytorch.graph": {name: _absent(f"TE's {name}") for name in _GRAPH_FUNCTIONS},
        "pytorch.utils": {"make_weak_ref": _absent("TE's make_weak_ref")},
        "pytorch.attention": {"_SplitAlongDim": functions.Split},
        "pytorch.attention.rope": {"apply_rotary_pos_emb": modules.apply_rotary_pos_emb},
        "pytorch.cpp_extensions": {"general_gemm": modules.general_gemm},
        "pytorch.router": {name: _absent(f"TE's {name}") for name in _FUSED_ROUTERS},
    }


class FP8GlobalStateManager:
    """Quantization is off: a plan counts the memory of bfloat16."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Always False."""
        return False


class _QuantizedTensor:
    """No tensor is an instance of this."""


class _Recipe:
    """A base for classes that derive from TE's; it cannot be instantiated."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        raise modules.refused("FP8")


@contextmanager
def _no_context(*_args: Any, **_settings: Any) -> Any:
    yield


def _absent_operation(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"TE's operation {name}")


def _absent(what: str) -> Any:
    """A callable that also serves as a base class, and raises when called."""

    class Absent:
        def __init__(self, *_args: Any, **_settings: Any) -> None:
            raise modules.refused(what)

    return Absent
