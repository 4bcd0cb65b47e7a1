"""Gradients let go and buffers zeroed in a few calls.

Before each step Megatron-FSDP asks of every parameter by name what there is to let go, and zeroes
each bucket's buffer by a call of its own; and it does so once for the model and once more for each
of its optimizers (megatron-core's ``train_step`` and ``DistributedOptimizer.zero_grad``), looking
for the parameters in all modules each time. Here parameters are known, small buffers are zeroed
together, buffers that are zero still are left, and while the GPU zeroes, what is there is let go.

Note [Small buffers together]
    torch's fused kernels take 320 blocks of 65,536 elements a launch. A buffer of more elements
    would take several launches, and by ``zero_`` it takes one.

Note [Zero still]
    Buffers are zero still while no backward pass has begun since they were zeroed, and nobody has
    written to them otherwise. Megatron-FSDP makes a new set of parameters as a backward pass
    begins, but for one after a pass that ended in an exception, whose mark is still there. Other
    writes are counted by the tensors themselves: a collective does not count, and nothing but a
    backward pass reduces into these buffers.

Relied on: megatron-core 0.19.2 and megatron-fsdp 0.6.1, class ``ParamAndGradBuffer``:
``zero_grad``, ``ddp_config`` with its field ``megatron_fsdp_cuda_graph_mode``, ``dist_main_grad``,
which has gradients of parameters in ``optimizer_named_parameters`` and no others, and
``parameter_groups``, each with ``main_grad_buffer`` and ``hfsdp_helper_gbuf``;
``DataParallelBuffer.data``; ``MegatronFSDP.zero_grad_buffer``, which its adapter takes a bound copy
of, ``raw_param`` (parameters before they are exchanged for DTensors), whose mark
``grad_added_to_main_grad`` it clears, ``_params_require_handle_grad`` (a new set in each backward
pass) and ``_root_pre_backward_hook_issued`` (in a pass). torch 2.11: ``Tensor._version``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from megatron_cg.fsdp.fsdp_symbols import in_both
from megatron_cg.upstream.patch import put_over

_ZERO, _KEEPS = "zero_grad", "megatron_fsdp_cuda_graph_mode"
_ZERO_ALL, _RAW = "zero_grad_buffer", "raw_param"
_DECOUPLED = "decoupled_grad"
SMALL = 320 * 65_536
"""Elements; see Note [Small buffers together]."""
REPLACES = (
    *in_both(
        f"param_and_grad_buffer:ParamAndGradBuffer.{_ZERO}",
        "what zeroes gradients",
        fingerprints=("c4b2e1b06a826245",),
    ),
    *in_both(
        f"megatron_fsdp:MegatronFSDP.{_ZERO_ALL}",
        "what zeroes gradients and clears marks",
        fingerprints=("94dbfceff74083c2",),
    ),
)
RELIES_ON = (
    *REPLACES,
    *in_both(
        "megatron_fsdp:MegatronFSDP",
        "the wrapped model",
        attributes=(
            _ZERO_ALL,
            _RAW,
            "_params_require_handle_grad",
            "_root_pre_backward_hook_issued",
        ),
    ),
    *in_both(
        "param_and_grad_buffer:ParamAndGradBuffer",
        "the model's buffers",
        attributes=(
            _ZERO,
            "ddp_config",
            "dist_main_grad",
            "optimizer_named_parameters",
            "parameter_groups",
        ),
    ),
    *in_both(
        "param_and_grad_buffer:ParameterGroup",
        "one bucket's buffers",
        attributes=("main_grad_buffer", "hfsdp_helper_gbuf"),
    ),
    *in_both(
        "param_and_grad_buffer:DataParallelBuffer", "one kind of weights", attributes=("data",)
    ),
)


def install_zero(fsdp: Any, model: nn.Module | None = None) -> Callable[[], None]:
    """Shorten ``zero_grad_buffer`` of ``fsdp``, and ``zero_grad`` of its buffers; returns the undo.

    Args:
        fsdp: the ``MegatronFSDP``.
        model: what holds it, and may have a copy of its function.
    """
    store = fsdp.param_and_grad_buffer
    original = store.zero_grad
    zeroed = _Zeroed(fsdp)

    def zero_grad() -> None:
        # Asked in each step: the mode may come back, and then gradients are to stay.
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
    """``fsdp``, and modules around it that have its own function as theirs."""
    copies = (
        module
        for module in (model.modules() if model is not None else ())
        if getattr(vars(module).get(_ZERO_ALL), "__self__", None) is fsdp
    )
    return [fsdp, *copies]


class _Zeroed:
    """Whether buffers are as they were when they were zeroed; see Note [Zero still]."""

    def __init__(self, fsdp: Any) -> None:
        self._fsdp = fsdp
        self._pass: object = None
        self._writes: list[tuple[torch.Tensor, int]] = []

    def now(self) -> None:
        """They have been zeroed."""
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
