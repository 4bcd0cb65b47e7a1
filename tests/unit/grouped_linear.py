"""Transformer Engine's grouped linear layer for a CPU: one GEMM per expert, counts on the host."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_cg.tape.fakes import module_entry

_HERE, _REPLACED = sys.modules[__name__], "transformer_engine.pytorch.module.grouped_linear"
"""The classes and their code say that they are of it, so that a capture trusts them as its."""
SETTINGS = (None,) * 24
"""What Transformer Engine passes besides tensors, of a layer that uses none of it."""


@contextmanager
def in_place_of_te() -> Iterator[None]:
    """Let what is done to Transformer Engine's grouped GEMM be done to this one."""
    with module_entry(_REPLACED, _HERE):
        yield


def grouped_experts(layer: Any) -> Any:
    """Megatron's MoE layer with its grouped experts, which need no Transformer Engine here."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    grouped = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    submodules = replace(
        layer.keywords["submodules"], experts=partial(TEGroupedMLP, submodules=grouped)
    )
    return partial(layer, submodules=submodules)


__name__ = _REPLACED  # Of all below.


class _GroupedLinear(torch.autograd.Function):
    """The contract of Transformer Engine's; see ``experts/grouped_gemm.py``."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        m_splits: torch.Tensor,
        non_tensor_args: Any,
        out: Any,
        dgrad_out: Any,
        *weights_and_biases: torch.Tensor,
    ) -> tuple[torch.Tensor, list[None]]:
        splits = m_splits.tolist()
        ctx.save_for_backward(inp, *weights_and_biases)
        ctx.splits = splits
        parts = zip(inp.split(splits), weights_and_biases, strict=True)
        return torch.cat([rows @ weight.t() for rows, weight in parts]), [None] * len(splits)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows, *weights = ctx.saved_tensors
        parts = gradients[0].split(ctx.splits)
        back = torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
        into = zip(parts, rows.split(ctx.splits), strict=True)
        return (back, None, None, None, None, *[part.t() @ share for part, share in into])


class GroupedLinear(nn.Module):
    """``weight0`` to ``weightN`` of the local experts, made by Megatron's initializer.

    Takes the arguments of megatron-core's ``TEGroupedLinear``; those not named here are ignored.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        pg_collection: Any,
        **_unused: Any,
    ) -> None:
        super().__init__()
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            # Megatron reduces its gradient over the ranks that have this expert.
            weight.allreduce = pg_collection.ep.size() == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)
        self._init_method = init_method
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the weights their first values; Megatron-FSDP calls it for those on ``meta``."""
        for weight in self.parameters():
            self._init_method(weight)

    def forward(
        self, rows: torch.Tensor, m_splits: list[int] | torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """``[rows, in]``, sorted by expert, to ``[rows, out]``, and no bias."""
        splits = torch.as_tensor(m_splits, dtype=torch.int64)
        apply: Any = _GroupedLinear.apply
        result, _ = apply(rows, splits, SETTINGS, None, None, *self._parameters.values())
        return result, None

    def backward_dw(self) -> None:
        """Nothing: weight gradients are not delayed."""
