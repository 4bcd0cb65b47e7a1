"""A warning for a loop that never enters ``step()`` and so always trains eagerly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from megatron_cg.upstream.copies import look_before

logger = logging.getLogger(__name__)


def remind_of_steps(model: nn.Module, passes: int) -> Callable[[], None]:
    """Log one warning after more than ``passes`` training passes; returns a function to cancel it.

    Call that function when a step is entered. A pass counts in training mode with gradients on.
    """
    seen = 0

    def count(module: nn.Module, _args: object, _kwargs: object) -> None:
        nonlocal seen
        if not module.training or not torch.is_grad_enabled():
            return
        seen += 1
        if seen > passes:
            stop()
            logger.warning(
                "megatron_cg: %d training passes ran outside of step(), so nothing is captured and "
                "all of them are eager. Put each training step, up to the optimizer's, into "
                "'with graphs.step():'.",
                seen,
            )

    stop = look_before(model, count)
    return stop
