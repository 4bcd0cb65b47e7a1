"""Megatron-FSDP's units and their memory.

Relied on: megatron-core 0.19.2, ``megatron_fsdp.param_and_grad_buffer``, ``ParamAndGradBuffer``:
``parameter_groups`` (``ParameterGroup``), ``weight_alloc`` and ``main_grad_alloc``
(``FixedPoolAllocator.fsdp_double_buffer_units`` and ``size``), ``DataParallelBuffer`` with
``bucket_index.size``, ``data_size``, ``dtype`` and ``is_data_distributed``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


def describe_buffers(fsdp: Any, unit_names: dict[int, str]) -> dict[str, Any]:
    """Units with their buckets, and the totals by dtype, all in bytes on one rank.

    ``unsharded`` is a whole bucket with its padding; ``shards`` is this rank's share of it. All
    units that fit share ``double_buffers``. With ``--fsdp-db-use-persist-buf-on-alloc-fail``, each
    other unit has its own ``persistent_buffers``.
    """
    store = fsdp.param_and_grad_buffer
    units: dict[Any, dict[str, Any]] = {}
    totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for group in store.parameter_groups:
        unit = units.setdefault(
            group.fsdp_unit_id,
            {
                "unit": group.fsdp_unit_id,
                "name": unit_names.get(group.fsdp_unit_id, "outside of all units"),
                "parameters": 0,
                "elements": 0,
                "double_buffered": _is_double_buffered(store, group),
                "buckets": [],
            },
        )
        unit["parameters"] += len(group.params)
        unit["elements"] += sum(p.numel() for p in group.params)
        unit["buckets"].append(_bucket(group))
        for name, buffer in _buffers(group):
            totals["shards"][f"{name} {_dtype(buffer.dtype)}"] += _bytes(
                buffer.data_size, buffer.dtype
            )
    for name, allocator, attribute in (
        ("weights", store.weight_alloc, "model_weight_buffer"),
        ("gradients", store.main_grad_alloc, "main_grad_buffer"),
    ):
        _add_temporary(totals, name, allocator, store.parameter_groups, attribute)
    return {
        "strategy": store.ddp_config.data_parallel_sharding_strategy,
        "units": list(units.values()),
        "totals": {kind: dict(by_name) for kind, by_name in totals.items()},
    }


def _bucket(group: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "experts": bool(group.is_expert_param),
        "dtype": _dtype(group.dtype),
        "parameters": len(group.params),
    }
    for name, buffer in _buffers(group):
        whole = _bytes(buffer.bucket_index.size, buffer.dtype)
        entry[name] = {
            "dtype": _dtype(buffer.dtype),
            "unsharded": whole,
            "shard": _bytes(buffer.data_size, buffer.dtype),
        }
    return entry


def _buffers(group: Any) -> list[tuple[str, Any]]:
    named = (
        ("weights", group.model_weight_buffer),
        ("main_weights", group.main_weight_buffer),
        ("gradients", group.main_grad_buffer),
    )
    return [(name, buffer) for name, buffer in named if buffer is not None]


def _is_double_buffered(store: Any, group: Any) -> bool:
    return group.fsdp_unit_id in getattr(store.weight_alloc, "fsdp_double_buffer_units", ())


def _add_temporary(
    totals: dict[str, dict[str, int]], name: str, allocator: Any, groups: Any, attribute: str
) -> None:
    """Buffers for whole buckets: two for all units that fit the pool, one for each other unit."""
    pooled = getattr(allocator, "fsdp_double_buffer_units", None)
    if pooled is None:
        return
    for group in groups:
        buffer = getattr(group, attribute)
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


def _dtype(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
