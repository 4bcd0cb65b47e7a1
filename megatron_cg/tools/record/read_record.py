"""The format of a record, and the only function that reads one.

``record.py`` writes ``rank<N>.jsonl``, one JSON object a line. A reader puts the lines together to
one dictionary: lists such as ``steps`` grow, ``parameters`` gains names, and any other key is set.
``evaluation`` has losses of an evaluation after the last step. A run that is killed may leave a
part of a last line, which is ignored.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError

FORMAT = 1
FILE = re.compile(r"rank(0|[1-9][0-9]*)\.jsonl")
_GROWING = ("steps", "captures")


class RecordError(MegatronCGError):
    """A run left no record, or one that cannot be read."""


def read_run(directory: Path) -> dict[int, dict[str, Any]]:
    """The record of each rank in ``directory``, by rank.

    Raises RecordError with one line if there is none, or a line of one cannot be read. Values are
    not checked: a run writes what fits.
    """
    files = record_files(directory)
    if not files:
        raise RecordError(
            f"{directory} holds no record (rank0.jsonl, ...): training did not begin, the record "
            "could not be written, or the run was not started with --cg-record."
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


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = {name: [] for name in _GROWING}
    data |= {"parameters": {}, "graphs": None, "finished": False, "error": None}
    *lines, last = path.read_bytes().split(b"\n")
    with suppress(ValueError, RecursionError):  # A killed run may leave a part of a line.
        json.loads(last)
        lines.append(last)
    number = 0
    try:
        for line in lines:
            number += 1
            _add(data, line.decode())
        if path.name != f"rank{data['rank']}.jsonl" or data["rank"] >= data["world_size"]:
            raise ValueError(f"it is of rank {data['rank']} of {data['world_size']}")
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        cause = f"line {number}: {type(error).__name__}: {error}".encode("unicode_escape").decode()
        raise RecordError(f"{path} is not a record of this package: {cause[:200]}.") from None
    return data


def _add(data: dict[str, Any], line: str) -> None:
    """Add a line to what was read before."""
    entry = json.loads(line)
    if entry.get("format", FORMAT) != FORMAT:
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
