"""Fresh gradient accumulators for a capture.

Note [An old graph of autograd keeps its streams]
    A parameter has one AccumulateGrad node for as long as any graph of autograd refers to it, and
    that node belongs to the stream it was made on. A training loop that still holds the last step's
    loss holds that step's graph, and so nodes of the ordinary stream. A backward pass under capture
    then waits for that stream at its end, which ends the capture: "operation would make the legacy
    stream depend on a capturing blocking stream" (torch 2.11). A node that is made anew inside of
    the capture belongs to the stream of the capture. torch gives a parameter a new one once its
    data has had another dtype (``VariableHooks::set_data``: "resets gradient accumulator if
    metadata is out of date").
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def forget_accumulators(modules: Iterable[nn.Module]) -> None:
    """Let the next pass make new AccumulateGrad nodes; see the note above.

    Parameters keep their data, gradients and hooks. Quantized ones are left alone.

    Args:
        modules: whose parameters, those of their submodules included, are meant.
    """
    for parameter in {p: None for module in modules for p in module.parameters()}:
        data = parameter.data
        if type(data) is torch.Tensor:
            other = torch.float64 if data.dtype == torch.float32 else torch.float32
            parameter.data = torch.empty(0, dtype=other, device=data.device)
            parameter.data = data
