"""Records made up for tests, with all that one can hold. Nothing was run."""

import json
import math
from pathlib import Path
from typing import Any

from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.tools.record.compare import FORMAT

MIB = 2**20
CAPTURED, LAYERS = 5, 24
"""The steps before the capture, and the graphs that it makes."""


def make_record(
    *, steps: int = 40, graphs: bool = True, off: int | None = None, rank: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """One rank's record; from step ``off`` on its losses are not those of the others."""
    replays = max(0, steps - CAPTURED) * LAYERS * graphs
    counters = Counters()
    counters.captured, counters.mismatched = LAYERS * bool(replays), int(steps >= 20)
    counters.eager, counters.replayed = counters.mismatched, replays - counters.mismatched
    capture = {"after_step": CAPTURED, "layers": LAYERS, "graphs": LAYERS, "error": None}
    return {
        **{"rank": rank, "format": FORMAT, "world_size": ranks},
        "versions": {"torch": "0.0", "megatron-cg": "0.0"},
        "device": "a made-up GPU",
        "command": ["train.py", "--seed", "1", *(["--cuda-graph-modules", "attn"] * graphs)],
        **{"finished": True, "error": None, "parameters": {"main:w": "a", "model:w": "b"}},
        "steps": [_step(step, graphs and step > CAPTURED, off) for step in range(1, steps + 1)],
        "captures": [{**capture, "seconds": 2.47, "memory": {}}] * bool(replays),
        "graphs": counters.as_dict() if graphs else None,
    }


def _step(step: int, with_graphs: bool, off: int | None) -> dict[str, Any]:
    more = 1e-4 * math.cos(step) if off is not None and step >= off else 0.0
    slow = 4000.0 if step == 1 else 0.0
    return {
        "losses": {"lm loss": 6 - step / 8 + more, "load_balancing_loss": 1 + 1 / step},
        "grad_norm": 1 + 1 / step,
        "skipped": False,
        "milliseconds": (102.0 if with_graphs else 152.0) + slow,
    }


def write(directory: Path, *records: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for rank, record in enumerate(records):
        whole = record | {"rank": rank, "world_size": len(records)}
        (directory / f"rank{rank}.jsonl").write_text(json.dumps(whole))
    return directory
