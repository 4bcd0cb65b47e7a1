"""Records made up for the test of the page, with all that a record can hold. Nothing was run."""

import json
import math
from pathlib import Path
from typing import Any

from megatron_cg.replay.mismatch_policy import Counters
from megatron_cg.tools.record.read_record import FORMAT

MIB = 2**20
CAPTURED, LAYERS = 5, 24
MISMATCH = (
    "megatron_cg: no replay of layer 3: argument <hidden> & co was (512, 2, 64) at "
    "capture and is (256, 2, 64) now (shape). A batch of another size. Reported once."
)


def make_record(
    *, steps: int = 40, graphs: bool = True, off: int | None = None, world_size: int = 1
) -> dict[str, Any]:
    """One rank's record; from step ``off`` on its losses are not those of the others."""
    record: dict[str, Any] = {
        **{"rank": 0, "format": FORMAT, "world_size": world_size, "setup": {}},
        "versions": {"torch": "0.0", "megatron-cg": "0.0"},
        "device": "a made-up GPU",
        "command": ["train.py", "--seed", "1", *(["--cuda-graph-modules", "attn"] * graphs)],
        "environment": {"NCCL_GRAPH_REGISTER": "0"},
        **{"finished": True, "error": None, "parameters": {"main:w": "a"}, "graphs": None},
        **{"steps": [], "captures": [], "events": []},
        "peak_allocated_bytes": (26000 + 900 * graphs) * MIB,
    }
    counters = Counters()
    for step in range(1, steps + 1):
        with_graphs = graphs and step > CAPTURED
        record["steps"].append(_step(step, with_graphs, off))
        if with_graphs:
            mismatched = int(step == 20)
            counters.captured = LAYERS
            counters.replayed += LAYERS - mismatched
            counters.eager += mismatched
            counters.mismatched += mismatched
    if graphs:
        record["captures"] += [_capture()] * (steps > CAPTURED)
        record["graphs"] = counters.as_dict()
        record["events"].append({"after_step": 19, "level": "warning", "text": MISMATCH})
    return record


def _step(step: int, with_graphs: bool, off: int | None) -> dict[str, Any]:
    loss = 5.5 + 4 * math.exp(-step / 30) + 0.1 * math.sin(7 * step)
    if off is not None and step >= off:
        loss += 1e-4 * math.cos(step)
    slow = 4000.0 if step == 1 else 0.0
    return {
        "losses": {"lm loss": loss, "load_balancing_loss": 1 + 1 / step},
        "grad_norm": 1 + 1 / step,
        "skipped": False,
        "milliseconds": (102.0 if with_graphs else 152.0) + slow,
    }


def _capture() -> dict[str, Any]:
    return {
        **{"after_step": CAPTURED, "layers": LAYERS, "graphs": LAYERS, "error": None},
        "seconds": 2.47,
        "memory": {},
    }


def write(directory: Path, *records: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for rank, record in enumerate(records):
        whole = record | {"rank": rank, "world_size": len(records)}
        (directory / f"rank{rank}.jsonl").write_text(json.dumps(whole))
    return directory


def make_rank(
    graphs: dict[str, int] | None = None, steps: int = 3, *, rank: int = 0, world_size: int = 1
) -> dict[str, Any]:
    """What one rank leaves of a run that ended well; nothing was run."""
    return make_record(steps=0, graphs=False, world_size=world_size) | {
        "rank": rank,
        "setup": {"model": {"hidden_size": 32}, "data": {"data_path": ["9 bytes"]}},
        "device": "cpu",
        "graphs": graphs,
        "steps": [
            {
                "losses": {"lm loss": 5.0 - step / 3},
                "grad_norm": 1.0 + step / 7,
                "skipped": False,
                "milliseconds": 1.0,
            }
            for step in range(steps)
        ],
        "parameters": {"main:w": "aa", "model:w": "bb"},
    }


def capture(after_step: int) -> dict[str, Any]:
    return {"after_step": after_step, "error": None}
