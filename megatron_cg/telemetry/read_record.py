"""The format of a record, and the only function that reads one.

``record.py`` writes ``rank<N>.jsonl``, one JSON object a line. A reader puts the lines together to
one dictionary: lists such as ``steps`` grow, ``parameters`` gains names, and any other key is set.
``evaluation`` has losses of an evaluation after the last step. A run that is killed may leave a
part of a last line, which is ignored.
"""

import json
import re
import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError

FORMAT = 1
FILE = re.compile(r"rank(0|[1-9][0-9]*)\.jsonl")
_GROWING = ("steps", "captures", "intervals", "events")
_HEADER = ("format", "rank", "world_size", "versions", "device")
"""Keys of the first line without which a record cannot be compared."""

_MOST = 2**53
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "a text": lambda v: type(v) is str,
    "true or false": lambda v: type(v) is bool,
    "a count": lambda v: type(v) is int and 0 <= v < _MOST,
    "a time": lambda v: type(v) in (int, float) and 0 <= v < _MOST,
    "a number": lambda v: type(v) is float or (type(v) is int and abs(v) < _MOST),
}
_TEXTS, _COUNTS, _NUMBERS = {str: "a text"}, {str: "a count"}, {str: "a number"}
_STEP = {"losses": _NUMBERS, "grad_norm": ("a number",), "skipped": "true or false"}
_CAPTURE = {**dict.fromkeys(("after_step", "layers", "graphs"), "a count"), "error": ("a text",)}
_INTERVAL = {"step": "a count", "counters": _COUNTS, "memory": ({"allocated_bytes": "a count"},)}
_EVENT = {"after_step": "a count", "level": "a text", "text": "a text"}
_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("format", "rank", "world_size", "peak_allocated_bytes"), "a count"),
    **{"began": "a text", "device": "a text", "command": ["a text"], "error": ("a text",)},
    **{"versions": {str: ("a text",)}, "environment": _TEXTS, "parameters": _TEXTS},
    **{"setup": {str: {}}, "evaluation": _NUMBERS, "graphs": (_COUNTS,)},
    **{"finished": "true or false", "intervals": [_INTERVAL], "events": [_EVENT]},
    **{
        "steps": [_STEP | {"milliseconds": "a time"}],
        "captures": [_CAPTURE | {"seconds": "a time"}],
    },
}
"""The kind of each key that is read. ``str`` is any key; a kind in brackets may also be null."""


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
    if not path.is_file():  # To open a pipe would wait for its writer.
        raise RecordError(f"{path} is not a record of this package: it is not a regular file.")
    data: dict[str, Any] = {name: [] for name in _GROWING}
    data |= {"setup": {}, "parameters": {}, "graphs": None, "finished": False, "error": None}
    *lines, last = path.read_bytes().split(b"\n")
    with suppress(ValueError, RecursionError):  # A killed run may leave a part of a line.
        json.loads(last)
        lines.append(last)
    number = 1
    try:
        for line in lines:
            _add(data, line.decode())
            if data["rank"] >= data["world_size"] or path.name != f"rank{data['rank']}.jsonl":
                raise ValueError(
                    f"it is of rank {data['rank']} of {data['world_size']}, unlike the file's name"
                )
            number += 1
        if "rank" not in data:
            raise ValueError("it has no rank")
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{path} is not a record of this package: line {number}: {error}."
        ) from None
    return data


def _add(data: dict[str, Any], line: str) -> None:
    """Add a line to what was read before. Raises ValueError if it is damaged."""
    entry = json.loads(line)
    json.dumps(entry, ensure_ascii=False).encode()  # Half a surrogate pair cannot be printed.
    first = [] if "format" in data else _HEADER
    _check(entry, {name: _KEYS[name] for name in first}, "it")
    if entry.get("format", FORMAT) != FORMAT:
        raise ValueError("it is of another version, so record the run again")
    _check(entry, {name: _KEYS[name] for name in _KEYS if name in entry}, "it")
    for name, value in entry.items():
        if name in _GROWING:
            data[name] += value
        elif name == "parameters":
            data[name] |= value
        elif name == "evaluation":
            if not data["steps"]:
                raise ValueError("it has an evaluation, and no step before it")
            data["steps"][-1]["losses"] |= value
        else:
            data[name] = value


def _check(value: Any, kind: Any, where: str) -> None:
    """Raise ValueError with the place of the first value that is not of its kind."""
    if isinstance(kind, tuple):
        if value is not None:
            _check(value, kind[0], where)
    elif isinstance(kind, str):
        if not _KINDS[kind](value):
            raise ValueError(f"{where} is {reprlib.repr(value)}, not {kind}")
    elif type(value) is not type(kind):
        what = "an object" if isinstance(kind, dict) else "a list"
        raise ValueError(f"{where} is {reprlib.repr(value)}, not {what}")
    elif isinstance(kind, list):
        for number, item in enumerate(value):
            _check(item, kind[0], f"{where}[{number}]")
    else:
        for name in value if str in kind else kind:
            if name not in value:
                raise ValueError(f"{where} has no {name}")
            place = f"{where}[{reprlib.repr(name)}]" if where != "it" else name
            _check(value[name], kind[str if str in kind else name], place)
