"""Results as runs on GPUs would leave them, of the run in ``result.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_cg.tools.bench.runs.configurations import DDP_GRAPHS, EAGER, GRAPHS

RUN = Path(__file__).with_name("result.json").read_text(encoding="utf-8")
"""With graphs; its key has no round, as earlier versions wrote it."""


def made_result(
    configuration: str = EAGER,
    steps: tuple[float, ...] = (100.0, 102.0, 104.0, 110.0, 101.0),
    **changes: Any,
) -> dict[str, Any]:
    """One run's result; ``changes`` whose names are the key's go there."""
    run: dict[str, Any] = json.loads(RUN)
    run["key"]["contender"] = configuration
    names = {*run["key"], "round"} & changes.keys()
    run["key"] |= {name: changes.pop(name) for name in names}
    (rank,) = run["ranks"]
    rank["timed"]["step_ms"] = list(steps)
    if configuration == EAGER:
        rank["captures"], rank["timed"]["counters"] = [], None
        run["device_trace"]["graph_launches"] = run["trace"]["graph_launches"] = 0.0
    run["ranks"].append({**rank, "rank": 1})
    return run | changes


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
