"""The format of a record, and the only function that reads one.

``record.py`` writes ``rank<N>.jsonl``, one JSON object a line. A reader puts the lines together to
one dictionary: lists such as ``steps`` grow, ``parameters`` gains names, and any other key is set.
``evaluation`` has losses of an evaluation after the last step. A run that is killed may leave a
part of a last line, which is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError

FORMAT = 1
FILE = re.compile(r"rank\d+\.jsonl")
_GROWING = ("steps", "captures", "intervals", "events")


class RecordError(MegatronCGError):
    """A run left no record, or one that cannot be read."""


def read_run(directory: Path) -> dict[int, dict[str, Any]]:
    """The record of each rank in ``directory``, by rank.

    Raises RecordError with one line: the folder has no record, or one of its records is damaged or
    of another version.
    """
    files = record_files(directory)
    if not files:
        raise RecordError(
            f"{directory} holds no record (rank0.jsonl, ...): training did not begin, the record "
            "could not be written, or the run was not started with --cg-record or --cg-report."
        )
    ranks = {data["rank"]: data for data in map(_read, files)}
    sizes = sorted({data["world_size"] for data in ranks.values()})
    if len(sizes) > 1:
        raise RecordError(
            f"{directory} holds records of runs with {' and '.join(map(str, sizes))} ranks: give "
            "each run a folder of its own."
        )
    return ranks


def record_files(directory: Path) -> list[Path]:
    """The files in ``directory`` with the name of a record, sorted by name."""
    return sorted(path for path in directory.iterdir() if FILE.fullmatch(path.name))


def captured_after(record: Mapping[str, Any]) -> int | None:
    """The number of steps before the first capture that made graphs; None if there is none."""
    made = (capture for capture in record["captures"] if not capture["error"])
    first = next(made, None)
    return None if first is None else int(first["after_step"])


def _read(path: Path) -> dict[str, Any]:
    try:
        data = _joined(path.read_text(encoding="utf-8"))
        if "rank" not in data:
            raise ValueError("it has no rank")
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise RecordError(f"{path} is not a record of this package: {error}.") from None
    return data


def _joined(text: str) -> dict[str, Any]:
    data: dict[str, Any] = {name: [] for name in _GROWING}
    data |= {"setup": {}, "parameters": {}, "graphs": None, "finished": False, "error": None}
    *lines, last = text.split("\n")
    for line in [*lines, last] if last.endswith("}") else lines:
        entry = json.loads(line)
        if data.setdefault("format", entry.get("format")) != FORMAT:
            raise ValueError("it is of another version, so record the run again")
        for name, value in entry.items():
            if name in _GROWING:
                data[name] += value
            elif name == "parameters":
                data[name] |= value
            elif name == "evaluation":
                data["steps"][-1]["losses"] |= value
            else:
                data[name] = value
    return data
