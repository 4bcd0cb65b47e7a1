"""A small record, whole and of the types that a real one has."""

from typing import Any

from tests.unit.tools.report.made_up import make_record

Record = dict[str, Any]


def make_rank(
    graphs: dict[str, int] | None = None, steps: int = 3, *, rank: int = 0, world_size: int = 1
) -> Record:
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


def capture(after_step: int) -> Record:
    return {"after_step": after_step, "error": None}
