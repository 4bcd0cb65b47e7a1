"""A small record, whole and of the types that a real one has."""

from typing import Any

from megatron_cg.telemetry.read_record import FORMAT

Record = dict[str, Any]


def make_rank(
    graphs: dict[str, int] | None = None, steps: int = 3, *, rank: int = 0, world_size: int = 1
) -> Record:
    """What one rank leaves of a run that ended well; nothing was run."""
    return {
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "setup": {"model": {"hidden_size": 32}, "data": {"data_path": ["9 bytes"]}},
        "versions": {"torch": "0.0", "megatron-cg": "0.0"},
        "device": "cpu",
        "command": ["train.py"],
        "environment": {},
        "error": None,
        "finished": True,
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
        "captures": [],
        "events": [],
    }


def capture(after_step: int) -> Record:
    return {"after_step": after_step, "error": None}
