"""The scale of a router's auxiliary loss, which the backward pass of a graph reads in place.

``forward_step_calc_loss`` of Megatron's schedules makes it with one element, and later copies into
it. A backward pass before any step makes it without a dimension, so that the copy would fail.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_cg.upstream.symbols import Symbol

_SCALER = Symbol(
    "megatron-core",
    "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler",
    "what scales the auxiliary loss of routers",
    attributes=("main_loss_backward_scale", "set_loss_scale"),
)
RELIES_ON = (_SCALER,)


def make_loss_scale(config: Any) -> None:
    """Make the scale as Megatron's schedules do, for a capture before the first step."""
    if config.num_moe_experts is None:
        return
    scaler = _SCALER.find()
    if scaler.main_loss_backward_scale is None:
        scaler.set_loss_scale(torch.ones(1, device=torch.cuda.current_device()))
