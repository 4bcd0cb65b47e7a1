"""Exchange of raw and sharded parameters from a table.

Megatron-FSDP's modules hold DTensors between steps, and raw parameters in a step. For each
exchange Megatron-FSDP walks over the names of all parameters twice, reads attributes, and resolves
every name from the root. The result is the same each time. So each exchange runs once, its result
is recorded in a table, and all later exchanges use the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from megatron_cg.fsdp.fsdp_symbols import fsdp_class, fsdp_function
from megatron_cg.upstream.patch import put_over

Slot = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]
"""A module's ``_parameters``, a name in it, and the parameter for that name."""

_RAW, _DISTRIBUTED = (
    "_replace_param_with_raw_if_needed",
    "_replace_param_with_distributed_if_needed",
)
REPLACES = (
    *fsdp_function(
        f"MegatronFSDP.{_RAW}", "what puts raw parameters in place", fingerprint="2dd6f630faf574bb"
    ),
    *fsdp_function(
        f"MegatronFSDP.{_DISTRIBUTED}",
        "what puts DTensors in place",
        fingerprint="d5c8b3ca8a0bcd12",
    ),
)
RELIES_ON = (*REPLACES, *fsdp_class("MegatronFSDP", "is_param_fsdp_distributed"))


def install_swap(fsdp: Any) -> Callable[[], None]:
    """Replace both exchanges of ``fsdp``, without changing its modules; returns the undo."""
    was_distributed = fsdp.is_param_fsdp_distributed
    getattr(fsdp, _DISTRIBUTED)()
    distributed = _slots(fsdp.module)
    getattr(fsdp, _RAW)()
    raw = _slots(fsdp.module)
    if was_distributed:
        getattr(fsdp, _DISTRIBUTED)()
    with ExitStack() as undo:
        undo.callback(put_over(fsdp, _RAW, _exchange(fsdp, raw, is_distributed=False)))
        undo.callback(
            put_over(fsdp, _DISTRIBUTED, _exchange(fsdp, distributed, is_distributed=True))
        )
        return undo.pop_all().close


def _slots(model: nn.Module) -> list[Slot]:
    return [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _exchange(fsdp: Any, slots: Sequence[Slot], *, is_distributed: bool) -> Callable[[], None]:
    def exchange() -> None:
        if fsdp.is_param_fsdp_distributed is is_distributed:
            return
        fsdp.is_param_fsdp_distributed = is_distributed
        for table, name, parameter in slots:
            table[name] = parameter

    return exchange
