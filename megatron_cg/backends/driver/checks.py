"""What a capture refuses before it runs anything, as TE's ``make_graphed_callables`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_cg.backends.driver.recorder import Recorded
from megatron_cg.errors import CaptureError, HookError
from megatron_cg.memory.storage import is_dense

#: Options of make_graphed_callables that ask for FP8, and those without effect without FP8.
_FP8_OPTIONS = ("enabled", "fp8_enabled", "calibrating", "fp8_calibrating")
_IDLE_OPTIONS = frozenset(
    {*_FP8_OPTIONS, "pool", "recipe", "fp8_recipe", "amax_reduction_group", "fp8_group"}
    | {"cache_quantized_params", "fp8_weight_caching", "allow_unused_input"}
)


def check_options(backend: str, options: Mapping[str, Any]) -> None:
    """Raise CaptureError for an option that the driver does not read, if it is unknown or FP8's."""
    unknown = sorted(set(options) - _IDLE_OPTIONS)
    if unknown:
        raise CaptureError(
            f"the backend {backend} knows no option {', '.join(unknown)} of "
            "make_graphed_callables: leave it out"
        )
    for name in _FP8_OPTIONS:
        asked = options.get(name)
        if any(asked) if isinstance(asked, tuple) else asked:
            raise CaptureError(
                f"{name} is set: the backend {backend} has no FP8. Leave --fp8-format out, or "
                "capture by Transformer Engine (--cg-backend te)."
            )


def check_modules(callables: Sequence[nn.Module]) -> None:
    """Raise for a module in evaluation (CaptureError), or with a trainable buffer (HookError)."""
    if not all(module.training for module in callables):
        raise CaptureError("a callable is in evaluation: call .train() before capture")
    for index, module in enumerate(callables):
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise HookError(
                f"callable {index} ({type(module).__name__}) has a buffer that requires a "
                "gradient: only parameters may be trainable. Make it a parameter."
            )


def check_autocast(device_type: str) -> None:
    """Raise CaptureError under an autocast that caches: a graph must not keep cached casts."""
    if torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled():
        raise CaptureError(
            "the capture runs under torch.autocast with its cache, and a graph would keep the "
            "cached casts of weights. Pass cache_enabled=False to torch.autocast."
        )


def check_outputs(label: str, outputs: Sequence[Any]) -> None:
    """Raise CaptureError if the callable ``label`` returns anything but dense tensors and None."""
    for output in outputs:
        if output is None or (isinstance(output, torch.Tensor) and is_dense(output)):
            continue
        kind = type(output).__name__
        if isinstance(output, torch.Tensor):
            kind = f"tensor that is not dense ({output.layout})"
        raise CaptureError(
            f"{label} returned a {kind}; a graph returns only dense tensors. Leave this module out "
            "of --cuda-graph-modules."
        )


def check_gradients(item: Recorded, gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise CaptureError for a sparse gradient: how many values it has is up to the inputs."""
    names = {id(parameter): name for name, parameter in item.module.named_parameters()}
    needing = (tensor for tensor in item.inputs if tensor.requires_grad)
    for tensor, gradient in zip(needing, gradients, strict=True):
        if gradient is not None and not is_dense(gradient):
            raise CaptureError(
                f"{item.label}: the gradient of {names.get(id(tensor), 'an input')} is sparse, and "
                "a graph returns only dense tensors. Make the module with sparse=False, or leave "
                "it out of --cuda-graph-modules."
            )
