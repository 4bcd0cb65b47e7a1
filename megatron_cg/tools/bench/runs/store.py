"""Results: the keys of their runs, and how they lie on disk.

There is one file per run, and one with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_cg.files import write_text
from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.runs.configurations import KNOWN

SCHEMA = {"name": "megatron_cg.bench", "version": 3}
_KNOWN = (SCHEMA, *(SCHEMA | {"version": version} for version in (1, 2)))
"""Version 1 had no rounds: a run without one belongs to the first. Version 2 had no device-only
trace: its GPU metrics come from the trace with host events."""
_KEYS = frozenset({"key", "invocation", "began", "status", "error", "ranks", "settings"})
"""Fields of a run that every version has written."""
_KEY_FIELDS = frozenset(
    {"shape", "grouped_gemm", "layers", "microbatches", "nproc", "dimension", "contender"}
)
"""Fields of a run's key that every version has written; ``contender`` names the configuration."""
FILE = "bench.json"
OK, FAILED, LEFT_OUT = "ok", "failed", "left out"
Key = Mapping[str, Any]
Result = dict[str, Any]


def slug(key: Key) -> str:
    """A key as a file's name."""
    grown = f".by-{key['dimension']}" if key["dimension"] else ""
    size = f"{key['layers']}layers-{key['microbatches']}mb-{key['nproc']}gpus"
    again = f".round{round_of(key)}" if round_of(key) > 1 else ""
    return f"{key['shape']}.{key['grouped_gemm']}.{size}{grown}.{key['contender']}{again}"


def round_of(key: Key) -> int:
    """The round of a run; keys of earlier versions have none, which means the first."""
    return int(key.get("round", 1))


def configuration_slug(key: Key) -> str:
    """The same for all rounds of one configuration at one point."""
    return slug({**key, "round": 1})


def table_slug(key: Key) -> str:
    """The same for all configurations at one point."""
    return slug({**key, "round": 1, "contender": ""})


def by_configuration(results: Iterable[Result]) -> list[list[Result]]:
    """The rounds of each configuration at each point, in order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(configuration_slug(result["key"]), []).append(result)
    return [sorted(group, key=lambda one: round_of(one["key"])) for group in groups.values()]


def keep(result: Result, directory: Path) -> Path:
    """Write one run's result to its own file in ``directory/runs``."""
    return write(
        [result], directory / "runs" / f"{slug(result['key'])}.{result['invocation']}.json"
    )


def kept(directory: Path) -> list[Result]:
    """The newest result of each key in ``directory``, from the common file and single runs."""
    files = [directory / FILE, *sorted((directory / "runs").glob("*.json"))]
    return newest(result for path in files if path.is_file() for result in read(path))


def newest(results: Iterable[Result]) -> list[Result]:
    """One result for each key, the one started last, in the order of their starts.

    A skipped run never replaces one that was made. All rounds of a configuration come from one
    invocation, its newest, because the code or the settings may have changed since.
    """
    ordered = sorted(results, key=lambda one: (one["status"] != LEFT_OUT, str(one["began"])))
    last = {configuration_slug(one["key"]): one["invocation"] for one in ordered}
    found = {
        slug(one["key"]): one
        for one in ordered
        if one["invocation"] == last[configuration_slug(one["key"])]
    }
    return sorted(found.values(), key=lambda result: str(result["began"]))


def read(path: Path) -> list[Result]:
    """The results in a file. Raises BenchError if it is not one of ours or of a later version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        data = {}
    schema, runs = data.get("schema"), data.get("runs")
    if schema not in _KNOWN:
        raise BenchError(
            f"{path} has the schema {schema}, which is not one that this version of megatron-cg "
            f"bench or an earlier one wrote: give a {FILE} of theirs."
        )
    if not isinstance(runs, list) or not all(map(_is_whole, runs)):
        raise BenchError(f"{path} has no list of whole runs: it was changed since it was written.")
    unknown = [name for run in runs if (name := run["key"]["contender"]) not in KNOWN]
    if unknown:
        raise BenchError(
            f"{path} has a run of the configuration {unknown[0]}, which this version does not have."
        )
    return runs


def _is_whole(run: Any) -> bool:
    if not isinstance(run, dict) or not run.keys() >= _KEYS:
        return False
    return isinstance(run["key"], dict) and run["key"].keys() >= _KEY_FIELDS


def write(results: list[Result], path: Path) -> Path:
    """Write ``results`` to a file that :func:`read` reads."""
    write_text(path, json.dumps({"schema": SCHEMA, "runs": results}, indent=1) + "\n")
    return path
