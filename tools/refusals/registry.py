"""All rows of the table, and the refusals that are about no feature."""

from __future__ import annotations

from tools.refusals import graphs, megatron, ours, recompute
from tools.refusals.row import Row

ROWS: tuple[Row, ...] = (
    *recompute.SUPPORTED,
    *ours.SUPPORTED,
    *graphs.ROWS,
    *recompute.NOT_YET,
    *ours.NOT_YET,
    *megatron.ROWS,
)

OWN_LOOP = frozenset(
    {
        *("fsdp2-cpu-offload", "fsdp2-extension", "fsdp2-group-of-modules", "fsdp2-no-parameters"),
        *("fsdp2-tensor-parallel", "fsdp-v2-order", "fsdp-v2-symmetric-memory", "no-fsdp-unit"),
        *("old-weights", "unit-arguments", "unit-autocast", "unit-not-called"),
        *(
            "unit-not-dense",
            "unit-recomputed",
            "unit-shared-gradients",
            "compiled-unit",
            "unit-kept-casts",
            "unit-view-written",
            "unit-writes-parameter",
        ),
    }
)
"""What ``graph_units`` refuses of a unit; ``docs/standalone.md`` lists them."""

MISTAKES = frozenset(
    {
        *("argument", "backend", "cg-layers", "flags-without-graphs"),
        *("exchange-without-expert-parallel", "exchange-without-experts"),
        *("full-recompute-without-fsdp", "rows-batches-elsewhere"),
        *("grouped-gemm", "grouped-gemm-without-experts", "host-read", "launcher"),
        *("megatron-core-version", "moe-without-experts", "nested-units", "no-graphs"),
        *("no-such-unit", "rows-below-average", "rows-without-expert-parallel"),
        *("rows-without-experts", "scope-selects-nothing", "transformer-engine-version"),
    }
)
"""Refusals of requests that contradict themselves, the model or the installation; each message says
what to type instead, and ``tests/unit/arguments/rule_cases*.py`` has a case of each rule."""
