"""What the native backend cannot capture, found before anything runs.

Note [Gradients that are written elsewhere]
    With fused accumulation the backward pass adds a weight's gradient to ``weight.main_grad``
    itself. Megatron's own linear layers (megatron-core 0.19.2, ``tensor_parallel/layers.py``,
    ``LinearWithGradAccumulationAndAsyncCommunication``) then set ``grad_added_to_main_grad`` from
    Python and return a tensor without values, or return None. TE's modules (2.20.2,
    ``fuse_wgrad_accumulation``) do the same. A replay runs no Python: whoever reduces the gradient
    would add the values that are not one, or would never hear of it. Warmup passes on made-up
    inputs would be added to ``main_grad`` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_cg.backends.te.te_if_loaded import fp8_recipe
from megatron_cg.errors import CaptureError
from megatron_cg.replay.guard.addresses import is_quantized

_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")


def refuse(
    callables: Sequence[nn.Module],
    samples: Sequence[tuple[Any, ...]],
    more_samples: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> None:
    """Raise CaptureError with every reason why these modules cannot be captured.

    Args:
        callables: the modules.
        samples: positional samples.
        more_samples: keyword samples.
        device: the GPU on which the capture runs.
    """
    reasons = []
    if fp8_recipe() is not None:
        reasons.append("FP8 is on (TE's autocast): leave the autocast before the capture")
    for index, module in enumerate(callables):
        label = f"callable {index} ({type(module).__name__})"
        reasons += [f"{label}: {reason}" for reason in _of_module(module, device)]
    for tensor in tree_leaves([list(samples), [dict(more) for more in more_samples]]):
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            reasons.append(f"a sample is on {tensor.device}: move it to {device}")
    if reasons:
        listed = "\n".join(f"  {number}. {reason}" for number, reason in enumerate(reasons, 1))
        raise CaptureError(
            f"The native backend cannot capture, {len(reasons)} "
            f"reason{'s' * (len(reasons) != 1)}:\n{listed}\n"
            'Transformer Engine\'s backend captures FP8: --cg-backend te, or backend="te".'
        )


def _of_module(root: nn.Module, device: torch.device) -> Iterator[str]:
    for name, module in root.named_modules():
        label = f"{name or 'the module itself'} ({type(module).__name__})"
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if getattr(module, "primary_weights_in_fp8", False) or any(map(is_quantized, own)):
            yield f"{label} has FP8 weights, whose scales no graph of this backend keeps"
        for option in _FUSED:
            if getattr(module, option, False):
                yield (
                    f"{label} has {option}=True, so its weight gradient is written into main_grad "
                    "and a replay would lose it: build the model with "
                    f"{option}=False (--no-gradient-accumulation-fusion)"
                )
        delays = getattr(module, "need_backward_dw", None)
        if callable(delays) and delays():
            yield (
                f"{label} computes weight gradients after its backward pass: build the model with "
                "delay_wgrad_compute=False"
            )
        elsewhere = {tensor.device for tensor in own if tensor.device != device}
        for place in sorted(map(str, elsewhere)):
            yield f"{label} has parameters or buffers on {place}: move the model to {device}"
