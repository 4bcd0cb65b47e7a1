"""Installs the fakes under the names of ``transformer_engine``, ``mamba_ssm`` and Apex's kernel.

Only in a separate process (``worker.py``) and before Megatron is imported, because Megatron's
classes derive from TE's when they are defined. The fakes are installed whether or not the packages
exist, so a plan is the same on every machine.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from megatron_cg.errors import MegatronCGError
from megatron_cg.tools.cpu.fakes import no_context
from megatron_cg.tools.cpu.grouped_linear import _GroupedLinear
from megatron_cg.tools.plan.fakes import attention, base, experts, linear, mamba
from megatron_cg.tools.plan.trace import compiled
from megatron_cg.upstream.patch import set_attribute

TE_VERSION = "2.20.2"
MAMBA_VERSION = "2.3.2"


def install() -> Callable[[], None]:
    """Install the fakes in ``sys.modules``; returns the undo.

    Raises MegatronCGError if Megatron is already imported.
    """
    if "megatron.core.extensions.transformer_engine" in sys.modules:
        raise MegatronCGError(
            "Megatron is imported already, so a plan cannot be made in this process; use "
            "megatron_cg.tools.plan.process, which starts another one."
        )
    # An installed convolution would be used only in part; without it Megatron uses torch's.
    fakes: dict[str, Any] = {name: _module(name, contents) for name, contents in FAKES.items()}
    fakes["causal_conv1d"] = None
    with ExitStack() as undo:
        taken = {name: sys.modules.pop(name) for name in list(sys.modules) if _root(name) in fakes}
        undo.callback(sys.modules.update, taken)
        for name, module in fakes.items():
            sys.modules[name] = module
            undo.callback(sys.modules.pop, name, None)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        # Before the import of Megatron, which compiles its fused functions at import.
        undo.callback(set_attribute(torch, "compile", compiled))
        return undo.pop_all().close


def _root(name: str) -> str:
    return name.partition(".")[0]


def _module(name: str, contents: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    # Code that checks whether a package exists asks for its spec.
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(contents)
    return module


def _absent(what: str) -> Any:
    """A callable that also serves as a base class, and raises when called."""

    class Absent:
        def __init__(self, *_args: Any, **_settings: Any) -> None:
            raise base.refused(what)

    return Absent


def _absent_operation(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"TE's operation {name}")


def _all_absent(names: str) -> dict[str, Any]:
    return {name: _absent(f"TE's {name}") for name in names.split()}


FAKES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": TE_VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": dict.fromkeys(
        ("DelayedScaling", "Format", "Recipe"), _absent("FP8")
    ),
    "transformer_engine.pytorch": {
        "Linear": linear.Linear,
        "LayerNormLinear": linear.LayerNormLinear,
        "GroupedLinear": experts.GroupedLinear,
        "LayerNorm": linear.LayerNorm,
        "RMSNorm": linear.RMSNorm,
        "DotProductAttention": attention.DotProductAttention,
        **dict.fromkeys(("fp8_model_init", "quantized_model_init", "autocast"), no_context),
    },
    # Quantization is off: a plan counts the memory of bfloat16.
    "transformer_engine.pytorch.fp8": {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "fp8_autocast": no_context,
        "fp8_model_init": no_context,
    },
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    "transformer_engine.pytorch.ops": {"__getattr__": _absent_operation},
    "transformer_engine.pytorch.module": {},
    "transformer_engine.pytorch.module.base": {
        "TransformerEngineBaseModule": base.TransformerEngineBaseModule
    },
    "transformer_engine.pytorch.module.grouped_linear": {"_GroupedLinear": _GroupedLinear},
    "transformer_engine.pytorch.distributed": {
        "CudaRNGStatesTracker": _absent("TE's states of random numbers"),
        "activation_recompute_forward": no_context,
        "is_fp8_activation_recompute_enabled": lambda: False,
        "checkpoint": _absent("activation checkpoints of TE"),
        "get_all_rng_states": dict,
    },
    "transformer_engine.pytorch.graph": _all_absent(
        "make_graphed_callables restore_fp8_tensors save_fp8_tensors set_capture_end "
        "set_capture_start"
    ),
    "transformer_engine.pytorch.utils": _all_absent("make_weak_ref"),
    "transformer_engine.pytorch.attention": {"_SplitAlongDim": attention.Split},
    "transformer_engine.pytorch.attention.rope": {
        "apply_rotary_pos_emb": attention.apply_rotary_pos_emb
    },
    "transformer_engine.pytorch.cpp_extensions": {"general_gemm": experts.general_gemm},
    "transformer_engine.pytorch.router": _all_absent(
        "fused_topk_with_score_function fused_compute_score_for_moe_aux_loss fused_moe_aux_loss"
    ),
    # Apex's. Megatron builds no output layer with gradient-accumulation fusion without it.
    "fused_weight_gradient_mlp_cuda": _all_absent("wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16"),
    "mamba_ssm": {"__version__": MAMBA_VERSION},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": mamba.RMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba.mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba.mamba_split_conv1d_scan_combined,
    },
}
"""Every module by name, parents first, with the attributes that Megatron reads."""
