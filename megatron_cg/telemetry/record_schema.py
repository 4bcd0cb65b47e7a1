"""The format of a record: the type of every field, and the only function that reads a file.

``record.py`` writes records. Everything else reads them through :func:`read_run`, which checks
them, so all other code can rely on the types below. Other fields are allowed: tests and users'
scripts may add their own.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError

FORMAT = 2
"""Format 1 had no ``world_size`` and no ``setup``."""
CAPTURED_AFTER = "captured_after_step"
FILE = re.compile(r"rank\d+\.json")
_SHOWN = 40
_LARGEST = 2**63


class RecordError(MegatronCGError):
    """A run left no record, or one that cannot be read."""


class _WrongFieldError(Exception):
    """One field is wrong; the text says which and why."""


Check = Callable[[Any, str], None]
"""Takes a value and its path in the record; raises _WrongFieldError."""


def _fail(value: Any, place: str, expected: str) -> None:
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    raise _WrongFieldError(f"{place} is {shown}, not {expected}")


def _kind(kind: Any, expected: str) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, kind):
            _fail(value, place, expected)

    return check


def _whole(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        _fail(value, place, "a whole number of 0 or more")


def _number(value: Any, place: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not -_LARGEST < value < _LARGEST:
        _fail(value, place, "a finite number")


def _hex(value: Any, place: str) -> None:
    try:
        float.fromhex(value)
    except (TypeError, ValueError, OverflowError):
        _fail(value, place, "a number as float.hex writes it")


def _text(value: Any, place: str) -> None:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        _fail(value, place, "a text")


def _anything(value: Any, place: str) -> None:
    """No code relies on the value's type."""


def _or_none(check: Check) -> Check:
    def optional(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return optional


def _list(check: Check) -> Check:
    def rows(value: Any, place: str) -> None:
        _is_list(value, place)
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]")

    return rows


def _table(check: Check) -> Check:
    def table(value: Any, place: str) -> None:
        _is_dict(value, place)
        for name, item in value.items():
            _text(name, f"a name in {place}")
            check(item, f"{place}.{name}")

    return table


def _fields(needed: Mapping[str, Check], more: Mapping[str, Check] | None = None) -> Check:
    """An object with all fields of ``needed`` and any of ``more``; other fields are ignored."""
    known = {**needed, **(more or {})}

    def fields(value: Any, place: str) -> None:
        _is_dict(value, place)
        prefix = f"{place}." if place else ""
        missing = [name for name in needed if name not in value]
        if missing:
            raise _WrongFieldError(f"it has no {', '.join(prefix + name for name in missing)}")
        for name, check in known.items():
            if name in value:
                check(value[name], prefix + name)

    return fields


_flag = _kind(bool, "true or false")
_is_list, _is_dict = _kind(list, "a list"), _kind(dict, "an object")
_exact = _fields({"hex": _hex})
_votes = _fields(dict.fromkeys(("votes", "issuing_ms", "waiting_ms", "exchanging_ms"), _number))
_peaks = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), _whole)
_point = _fields({"allocated_bytes": _whole}, {"reserved_bytes": _whole, "exact": _whole, **_peaks})
_memory = _fields({"allocated_bytes": _whole, "reserved_bytes": _whole}, _peaks)
_STEP = _fields(
    {
        "losses": _table(_exact),
        "grad_norm": _or_none(_exact),
        "skipped": _flag,
        "milliseconds": _number,
    },
    {"phases": _table(_number)},
)
_LAYER = _fields({"name": _text, "kind": _text, "graphed": _list(_text), "eager": _table(_text)})
_CAPTURE = _fields(
    {
        "after_step": _whole,
        "seconds": _table(_number),
        "memory": _table(_or_none(_point)),
        "layers": _whole,
        "graphs": _whole,
        "coverage": _list(_LAYER),
        "error": _or_none(_text),
    },
    {"patches": _list(_fields({"place": _text, "value": _text, "objects": _whole}))},
)
_INTERVAL = _fields(
    {
        "step": _whole,
        "counters": _table(_number),
        "agreement": _table(_number),
        "memory": _or_none(_memory),
    }
)
_RECORD = _fields(
    {
        "rank": _whole,
        "world_size": _whole,
        "versions": _table(_or_none(_text)),
        "device": _text,
        "setup": _table(_table(_anything)),
        "machine": _fields({}, {"gpu_bytes": _or_none(_number)}),
        "command": _list(_text),
        "environment": _table(_text),
        "finished": _flag,
        "error": _or_none(_text),
        "steps": _list(_STEP),
        "parameters": _table(_text),
        "graphs": _or_none(_table(_whole)),
        "captures": _list(_CAPTURE),
        "intervals": _list(_INTERVAL),
        "events": _list(_fields({"after_step": _whole, "level": _text, "text": _text})),
    },
    {
        "began": _text,
        CAPTURED_AFTER: _whole,
        "agreement": _votes,
        **_peaks,
    },
)


def read_run(directory: Path) -> dict[int, dict[str, Any]]:
    """The record of each rank in ``directory``, by rank.

    Raises RecordError with one line: the folder is missing, cannot be read or has no record, or one
    of its records is damaged or of another version.
    """
    files = record_files(directory)
    if not files:
        raise RecordError(
            f"{directory} holds no record (rank0.json, ...): training did not begin, the record "
            "could not be written, or the run was not started with --cg-record or --cg-report."
        )
    ranks = {}
    for path in files:
        data = _read_rank(path)
        ranks[data["rank"]] = data
    sizes = {data["world_size"] for data in ranks.values()}
    if len(sizes) > 1:
        raise RecordError(
            f"{directory} holds records of runs with {' and '.join(map(str, sorted(sizes)))} "
            "ranks: give each run a folder of its own."
        )
    return ranks


def record_files(directory: Path) -> list[Path]:
    """The files in ``directory`` with the name of a record, sorted by name.

    Raises RecordError when the folder is missing or cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        text = f"there is no folder {directory}: name one that a run has written."
        raise RecordError(text) from None
    except NotADirectoryError:
        text = f"{directory} is not a folder: name one that a run has written."
        raise RecordError(text) from None
    except OSError as error:
        raise RecordError(f"the folder {directory} cannot be read: {error.strerror}.") from None
    return [directory / name for name in sorted(names) if FILE.fullmatch(name)]


def _read_rank(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_content(path))
        _check(data, path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError, MemoryError, _WrongFieldError) as error:
        # Only the first line: a JSON error may continue with the text that it could not read.
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise RecordError(f"{path} is not a record of this package: {why}.") from None
    found: dict[str, Any] = data
    return found


def _content(path: Path) -> str:
    """The text of a regular file; opening another kind, such as a pipe, could block forever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _WrongFieldError("it is not a regular file")
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if file.read(1) != b"{":
            raise _WrongFieldError("it does not begin with {")
        return "{" + file.read().decode()


def _check(data: Any, path: Path) -> None:
    _is_dict(data, "it")
    form = data.get("format")
    if isinstance(form, bool) or form != FORMAT:
        _fail(form, "its format", f"{FORMAT}, which this version reads; record the run again")
    _RECORD(data, "")
    rank, size = data["rank"], data["world_size"]
    if path.name != f"rank{rank}.json":
        raise _WrongFieldError(f"it is of rank {rank}, and its name says another")
    if rank >= size:
        raise _WrongFieldError(f"its rank is {rank}, and its world_size {size}")
