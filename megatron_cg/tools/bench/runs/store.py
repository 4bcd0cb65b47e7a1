"""Stores results on disk: one file per run, and one with all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.errors import MegatronCGError
from megatron_cg.files import write_text
from megatron_cg.tools.bench.runs.bench_schedule import of_all_rounds, round_of, slug

SCHEMA = {"name": "megatron_cg.bench", "version": 3}
_KNOWN = (SCHEMA, *(SCHEMA | {"version": version} for version in (1, 2)))
"""Version 1 had no rounds: a run without one belongs to the first. Version 2 had no device-only
trace: its GPU metrics come from the trace with host events."""
_KEYS = frozenset({"key", "invocation", "began", "status", "error", "ranks", "settings"})
"""Fields of a run that every version has written."""
FILE = "bench.json"
OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
Result = dict[str, Any]


class ResultError(MegatronCGError):
    """A file is not a result of this benchmark."""


def keep(result: Result, directory: Path) -> Path:
    """Write one run's result to its own file in ``directory/runs``."""
    folder = directory / "runs"
    path = folder / f"{slug(result['key'])}.{result['invocation']}.json"
    _write(path, {"schema": SCHEMA, "runs": [result]})
    return path


def kept(directory: Path) -> list[Result]:
    """The newest result of each key in ``directory``, from the common file and single runs."""
    files = [directory / FILE, *sorted((directory / "runs").glob("*.json"))]
    return newest(result for path in files if path.is_file() for result in read(path))


def newest(results: Iterable[Result]) -> list[Result]:
    """One result for each key, the one started last, in the order of their starts.

    A skipped run never replaces one that was made. All rounds of a configuration come from one
    invocation, its newest, because the code or the settings may have changed since.
    """
    configurations: dict[str, list[Result]] = {}
    for result in results:
        configurations.setdefault(slug(of_all_rounds(result["key"])), []).append(result)
    found: list[Result] = []
    for group in configurations.values():
        group.sort(key=_order)
        last = group[-1]["invocation"]
        by_round = {round_of(r["key"]): r for r in group if r["invocation"] == last}
        found += by_round.values()
    return sorted(found, key=lambda result: str(result["began"]))


def _order(result: Result) -> tuple[bool, str]:
    return result["status"] != LEFT_OUT, str(result["began"])


def read(path: Path) -> list[Result]:
    """The results in a file. Raises ResultError if it is not one of ours or of a later version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        data = {}
    schema, runs = data.get("schema"), data.get("runs")
    if schema not in _KNOWN:
        raise ResultError(
            f"{path} has the schema {schema}, which is not one that this version of megatron-cg "
            f"bench or an earlier one wrote: give a {FILE} of theirs."
        )
    if not isinstance(runs, list) or not all(
        isinstance(r, dict) and r.keys() >= _KEYS for r in runs
    ):
        raise ResultError(f"{path} has no list of whole runs: it was changed since it was written.")
    return runs


def write_all(results: list[Result], directory: Path) -> Path:
    """Write ``directory/bench.json``."""
    path = directory / FILE
    _write(path, {"schema": SCHEMA, "runs": results})
    return path


def _write(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=1) + "\n")
