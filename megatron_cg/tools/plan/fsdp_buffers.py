"""Megatron-FSDP's units and their memory.

Relied on: megatron-core 0.19.2, ``megatron_fsdp.param_and_grad_buffer``, ``ParamAndGradBuffer``:
``parameter_groups`` (``ParameterGroup``), ``weight_alloc`` and ``main_grad_alloc``
(``FixedPoolAllocator.fsdp_double_buffer_units`` and ``size``), ``DataParallelBuffer`` with
``bucket_index.size``, ``data_size``, ``dtype`` and ``is_data_distributed``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

_BUFFERS = {
    "weights": "model_weight_buffer",
    "main_weights": "main_weight_buffer",
    "gradients": "main_grad_buffer",
}


def describe_buffers(fsdp: Any, decoder: Sequence[nn.Module]) -> dict[str, Any]:
    """Units with their buckets, and the totals by dtype, all in bytes on one rank.

    ``unsharded`` is a whole bucket with its padding; ``shards`` is this rank's share of it. All
    units that fit share ``double_buffers``. With ``--fsdp-db-use-persist-buf-on-alloc-fail``, each
    other unit has its own ``persistent_buffers``.
    """
    store = fsdp.param_and_grad_buffer
    names = _unit_names(store.parameter_groups, decoder)
    pooled = getattr(store.weight_alloc, "fsdp_double_buffer_units", ())
    units: dict[Any, dict[str, Any]] = {}
    totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for group in store.parameter_groups:
        number = group.fsdp_unit_id
        empty: dict[str, Any] = {
            "unit": number,
            "name": names.get(number, "outside of all units"),
            "parameters": 0,
            "elements": 0,
            "double_buffered": number in pooled,
            "buckets": [],
        }
        unit = units.setdefault(number, empty)
        unit["parameters"] += len(group.params)
        unit["elements"] += sum(p.numel() for p in group.params)
        unit["buckets"].append(bucket := _bucket(group))
        for name in _BUFFERS:
            if name in bucket:
                totals["shards"][f"{name} {bucket[name]['dtype']}"] += bucket[name]["shard"]
    for name, allocator in (("weights", store.weight_alloc), ("gradients", store.main_grad_alloc)):
        _add_temporary(totals, name, allocator, store.parameter_groups)
    return {
        "strategy": store.ddp_config.data_parallel_sharding_strategy,
        "units": list(units.values()),
        "totals": {kind: dict(by_name) for kind, by_name in totals.items()},
    }


def _unit_names(groups: Any, decoder: Sequence[nn.Module]) -> dict[int, str]:
    """The layer name of each unit, found by the parameter group of one of its parameters."""
    units = {id(p): group.fsdp_unit_id for group in groups for p in group.params}
    names: dict[int, str] = {}
    for index, layer in enumerate(decoder):
        for parameter in layer.parameters():
            if (unit := units.get(id(parameter))) is not None:
                names.setdefault(unit, f"layer {index}")
    return names


def _bucket(group: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "experts": bool(group.is_expert_param),
        "dtype": _dtype(group.dtype),
        "parameters": len(group.params),
    }
    for name, attribute in _BUFFERS.items():
        if (buffer := getattr(group, attribute)) is not None:
            entry[name] = {
                "dtype": _dtype(buffer.dtype),
                "unsharded": _bytes(buffer.bucket_index.size, buffer.dtype),
                "shard": _bytes(buffer.data_size, buffer.dtype),
            }
    return entry


def _add_temporary(
    totals: dict[str, dict[str, int]], name: str, allocator: Any, groups: Any
) -> None:
    """Buffers for whole buckets: two for all units that fit the pool, one for each other unit."""
    pooled: Any = getattr(allocator, "fsdp_double_buffer_units", None)
    for group in groups if pooled is not None else ():
        buffer = getattr(group, _BUFFERS[name])
        if buffer is None or not buffer.is_data_distributed:
            continue
        size = _bytes(buffer.bucket_index.size, buffer.dtype)
        kind = f"{name} {_dtype(buffer.dtype)}"
        if group.fsdp_unit_id == pooled[0]:
            totals["double_buffers"][kind] += allocator.size * size
        elif group.fsdp_unit_id not in pooled and allocator.fallback_to_persistent_buffer:
            totals["persistent_buffers"][kind] += size


def _bytes(elements: int, dtype: Any) -> int:
    return int(elements) * (1 if isinstance(dtype, str) else dtype.itemsize)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
