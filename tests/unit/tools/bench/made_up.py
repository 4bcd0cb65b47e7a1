"""Results as runs on GPUs would leave them."""

from __future__ import annotations

from typing import Any

from megatron_cg.tools.bench.runs.configurations import DDP_GRAPHS, EAGER, GRAPHS

KEY = {
    "shape": "llama",
    "contender": EAGER,
    "grouped_gemm": "default",
    "nproc": 2,
    "microbatches": 2,
    "layers": 8,
    "dimension": None,
}
"""Without a round, as earlier versions wrote it."""
NAMES = {*KEY, "round"}
MIB = 2**20


def made_result(
    configuration: str = EAGER,
    steps: tuple[float, ...] = (100.0, 102.0, 104.0, 110.0, 101.0),
    **changes: Any,
) -> dict[str, Any]:
    """One run's result; ``changes`` whose names are the key's go there."""
    key = KEY | {"contender": configuration}
    key |= {name: changes.pop(name) for name in list(changes) if name in NAMES}
    graphs = configuration != EAGER
    rank = _rank(steps, graphs)
    result = {
        "key": key,
        "invocation": "one",
        "began": "2026-01-01T00:00:00+00:00",
        "settings": {"scopes": ["attn", "mlp"]},
        "machine": {"gpus": ["NVIDIA H200"] * 2, "driver": "580.1", "processor": "a CPU"},
        "backend": "transformer_engine",
        "notice": "",
        "status": "ok",
        "error": "",
        "tail": [],
        "seconds": 40.0,
        "ranks": [rank, {**rank, "rank": 1}],
        "device_trace": _device_trace(graphs),
        "trace": _trace_with_host_events(graphs),
        "notes": [],
    }
    return result | changes


def _rank(steps: tuple[float, ...], graphs: bool) -> dict[str, Any]:
    memory = {"allocated": 800, "reserved": 1200, "peak_allocated": 1000, "peak_reserved": 1200}
    return {
        "rank": 0,
        "versions": {"torch": "2.11.0", "mamba-ssm": None},
        "device": {"name": "NVIDIA H200", "cuda": "13.0", "nccl": "2.28.9"},
        "finished": True,
        "captures": [
            {
                "after_step": 3,
                "seconds": 5.0,
                "warmup_seconds": 3.5,
                "memory": {"peak_allocated": 1500 * MIB},
                "error": "",
            }
        ]
        if graphs
        else [],
        "timed": {
            "step_ms": list(steps),
            "memory": {name: value * MIB for name, value in memory.items()},
            "counters": {"replayed": 4, "bytes_copied": 4000} if graphs else None,
            "loss": 5.5,
        },
        "probed": {
            "steps": 4,
            "step_ms": 120.0,
            "phases": [
                {"phase": "forward", "thread": "main", "calls": 2.0, "ms": 40.0, "own_ms": 30.0},
                {"phase": "unshard", "thread": "main", "calls": 9.0, "ms": 10.0, "own_ms": 10.0},
                {"phase": "unshard", "thread": "backward", "calls": 9.0, "ms": 8.0, "own_ms": 8.0},
            ],
            "not_there": [],
        },
    }


def _device_trace(graphs: bool) -> dict[str, Any]:
    return {
        "steps": 2,
        "busy_ms": 50.0,
        "busy_without_nccl_ms": 45.0,
        "nccl_ms": 12.0,
        "exposed_nccl_ms": 5.0,
        "idle_ms": 20.0,
        "idle_for_host_ms": 15.0,
        "kernel_launches": 900.0,
        "graph_launches": 16.0 if graphs else 0.0,
        "longest_gap_ms": 2.5,
    }


def _trace_with_host_events(graphs: bool) -> dict[str, Any]:
    """As earlier versions wrote it, without exposed_nccl_ms."""
    return {
        "steps": 2,
        "busy_ms": 52.0,
        "busy_without_nccl_ms": 40.0,
        "nccl_ms": 12.0,
        "idle_ms": 70.0,
        "idle_for_host_ms": 60.0,
        "kernel_launches": 901.0,
        "graph_launches": 16.0 if graphs else 0.0,
        "longest_gaps": [{"us": 7500.0}],
        "idle_by_launch": [
            {
                "thread": "main",
                "phase": "unshard",
                "launched_by": "aten::copy_",
                "launched_late": True,
                "ms": 30.0,
                "gaps": 12.0,
            }
        ],
        "idle_by_host_work": [
            {"thread": "main", "phase": "unshard", "what": "aten::empty", "ms": 20.0}
        ],
    }


def several_rounds() -> list[dict[str, Any]]:
    """Three rounds on a machine that slows down by half in the second, then is as before.

    Ratios to eager: 0.5, 0.6 and 0.55 of graphs; 0.5, 0.5 and 0.6 of DDP.
    """
    steps = {
        EAGER: [(199, 200, 201), (300, 300, 300), (200, 200, 200)],
        GRAPHS: [(90, 100, 110), (180, 180, 180), (110, 110, 110)],
        DDP_GRAPHS: [(100, 100, 100), (150, 150, 150), (120, 120, 120)],
    }
    return [
        _only_timed(made_result(name, times, round=number, began=f"2026-01-0{number}"), number)
        for name, rounds in steps.items()
        for number, times in enumerate(rounds, 1)
    ]


def _only_timed(made: dict[str, Any], number: int) -> dict[str, Any]:
    """As all rounds but the first are."""
    if number == 1:
        return made
    ranks = [{n: v for n, v in rank.items() if n != "probed"} for rank in made["ranks"]]
    return made | {"ranks": ranks, "device_trace": None, "trace": None}
