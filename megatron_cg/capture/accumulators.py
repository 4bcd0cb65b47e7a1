"""New gradient accumulators for a capture.

Note [An old graph of autograd keeps its streams]
    A parameter keeps its AccumulateGrad node as long as any autograd graph refers to the node. The
    node belongs to the stream on which it was created. If a training loop still holds the last
    step's loss, it also holds that step's autograd graph, with nodes of the normal stream. A
    backward pass under capture then waits for that stream at its end, and the capture fails:
    "operation would make the legacy stream depend on a capturing blocking stream" (torch 2.11). A
    node that is created inside the capture belongs to the capture stream. torch creates a new node
    after a parameter's data has had another dtype (``VariableHooks::set_data``: "resets gradient
    accumulator if metadata is out of date").
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def forget_accumulators(modules: Iterable[nn.Module]) -> None:
    """Make the next pass create new AccumulateGrad nodes; see the note above.

    Parameters keep their data, gradients and hooks. Quantized parameters are skipped.

    Args:
        modules: the modules with the parameters, which include those of submodules.
    """
    for parameter in {p: None for module in modules for p in module.parameters()}:
        data = parameter.data
        if type(data) is torch.Tensor:
            other = torch.float64 if data.dtype == torch.float32 else torch.float32
            parameter.data = torch.empty(0, dtype=other, device=data.device)
            parameter.data = data
