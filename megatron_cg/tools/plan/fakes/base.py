"""What the fakes of Transformer Engine's modules and of mamba-ssm's functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_cg.errors import MegatronCGError


class NotLikened(MegatronCGError):
    """The model uses a part of Transformer Engine that cannot be planned."""


def refused(what: str) -> NotLikened:
    """The error for such a part."""
    return NotLikened(f"a model with {what} cannot be planned yet: there is no fake of it.")


class TransformerEngineBaseModule(nn.Module):
    """``module/base.py``: the attributes that Megatron and Megatron-FSDP read of TE modules."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8_meta: dict[str, Any] = {}
        self.primary_weights_in_fp8 = False
        self.save_original_input = False

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Keep the group."""
        self.tp_group = group

    def need_backward_dw(self) -> bool:
        """Weight gradients are never delayed: the rules refuse that."""
        return False

    def add_parameters(self, dtype: Any, device: Any, **shapes: tuple[int, ...]) -> None:
        """Register a parameter of each name and shape."""
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device=device)
            self.register_parameter(name, nn.Parameter(empty))


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """``function.apply``, which torch does not type."""
    apply: Any = function.apply
    out: Tensor = apply(*inputs)
    return out


def like(tensor: Tensor | None) -> Tensor | None:
    """A new tensor such as ``tensor``, where there is one."""
    return None if tensor is None else torch.empty_like(tensor)
