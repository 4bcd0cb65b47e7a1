"""Gradients are released and buffers zeroed in a few calls.

Before each step Megatron-FSDP checks every parameter by name for what to release, and zeroes each
bucket's buffer by a call of its own. It does so once for the model and once more for each of its
optimizers (megatron-core's ``train_step`` and ``DistributedOptimizer.zero_grad``), and searches all
modules for the parameters each time. Here parameters are known, small buffers are zeroed together,
and buffers that are still zero are skipped. Gradients are released while the GPU zeroes.

Note [Small buffers together]
    torch's fused kernels take 320 blocks of 65,536 elements per launch. A larger buffer would take
    several launches, and ``zero_`` takes one.

Note [Still zero]
    Buffers are still zero if no backward pass has begun since they were zeroed, and no other code
    has written to them. Megatron-FSDP creates a new set of parameters when a backward pass begins.
    It does not if the previous pass ended in an exception, but then the flag of that pass is still
    set. Tensors themselves count other writes. They do not count a collective, but only a backward
    pass reduces into these buffers.

Megatron-FSDP's ``dist_main_grad`` has gradients of ``optimizer_named_parameters`` and no others.
``zero_grad_buffer`` clears the mark ``grad_added_to_main_grad`` of parameters before they are
exchanged for DTensors (``raw_param``). Megatron's adapter holds a bound copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.fsdp_symbols import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import put_over

_ZERO, _KEEPS = "zero_grad", "megatron_fsdp_cuda_graph_mode"
_ZERO_ALL, _RAW = "zero_grad_buffer", "raw_param"
_DECOUPLED = "decoupled_grad"
SMALL = 320 * 65_536
"""Elements; see Note [Small buffers together]."""
REPLACES = (
    *fsdp_function(
        f"ParamAndGradBuffer.{_ZERO}", "what zeroes gradients", fingerprint="c4b2e1b06a826245"
    ),
    *fsdp_function(
        f"MegatronFSDP.{_ZERO_ALL}",
        "what zeroes gradients and clears marks",
        fingerprint="94dbfceff74083c2",
    ),
)
RELIES_ON = (
    *REPLACES,
    *fsdp_class("MegatronFSDP", _RAW),
    *fsdp_class("MegatronFSDP", "_params_require_handle_grad", "_root_pre_backward_hook_issued"),
    *fsdp_class("ParamAndGradBuffer", "ddp_config", "dist_main_grad"),
    *fsdp_class("ParamAndGradBuffer", "optimizer_named_parameters", "parameter_groups"),
    *fsdp_class("ParameterGroup", "main_grad_buffer", "hfsdp_helper_gbuf"),
    *fsdp_class("DataParallelBuffer", "data"),
)


def install_zero(fsdp: Any, model: nn.Module | None = None) -> Callable[[], None]:
    """Shorten ``zero_grad_buffer`` of ``fsdp``, and ``zero_grad`` of its buffers; returns the undo.

    Args:
        fsdp: the ``MegatronFSDP``.
        model: the module that contains it, and may hold a copy of its function.
    """
    store = fsdp.param_and_grad_buffer
    original = store.zero_grad
    zeroed = _Zeroed(fsdp)

    def zero_grad() -> None:
        # Checked in each step: the mode may be set again, and then gradients must stay.
        if getattr(store.ddp_config, _KEEPS, True):
            original()
            return
        if not zeroed.still():
            _zero(store)
            zeroed.now()
        _let_go(store)

    def zero_grad_buffer() -> None:
        for parameter in getattr(fsdp, _RAW).values():
            if parameter.requires_grad:
                parameter.grad_added_to_main_grad = False
        store.zero_grad()

    with ExitStack() as undo:
        undo.callback(put_over(store, _ZERO, zero_grad))
        for owner in _owners(fsdp, model):
            undo.callback(put_over(owner, _ZERO_ALL, zero_grad_buffer))
        return undo.pop_all().close


def _owners(fsdp: Any, model: nn.Module | None) -> list[Any]:
    """``fsdp``, and modules around it that hold a bound copy of its function."""
    copies = (
        module
        for module in (model.modules() if model is not None else ())
        if getattr(vars(module).get(_ZERO_ALL), "__self__", None) is fsdp
    )
    return [fsdp, *copies]


class _Zeroed:
    """Whether buffers are unchanged since they were zeroed; see Note [Still zero]."""

    def __init__(self, fsdp: Any) -> None:
        self._fsdp = fsdp
        self._pass: object = None
        self._writes: list[tuple[torch.Tensor, int]] = []

    def now(self) -> None:
        """Record that the buffers have been zeroed."""
        self._pass = self._fsdp._params_require_handle_grad
        self._writes = self._counted()

    def still(self) -> bool:
        """Whether nothing has been written to them since."""
        counted = self._counted()
        return (
            self._fsdp._params_require_handle_grad is self._pass
            and not self._fsdp._root_pre_backward_hook_issued
            and len(counted) == len(self._writes)
            and all(
                data is before and count == at
                for (data, count), (before, at) in zip(counted, self._writes, strict=True)
            )
        )

    def _counted(self) -> list[tuple[torch.Tensor, int]]:
        return [(data, data._version) for data in _buffers(self._fsdp.param_and_grad_buffer)]


def _let_go(store: Any) -> None:
    for _, parameter in store.optimizer_named_parameters:
        parameter.grad = None
        if _DECOUPLED in parameter.__dict__:
            parameter.decoupled_grad = None
    for gradient in store.dist_main_grad.values():
        gradient._local_tensor = None


def _zero(store: Any) -> None:
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for data in _buffers(store):
        if data.numel() > SMALL:
            data.zero_()
        else:
            small.setdefault((data.device, data.dtype), []).append(data)
    for tensors in small.values():
        torch._foreach_zero_(tensors)


def _buffers(store: Any) -> Iterator[torch.Tensor]:
    for group in store.parameter_groups:
        for buffer in (group.main_grad_buffer, group.hfsdp_helper_gbuf):
            if buffer:
                yield buffer.data
