"""The machine of a measurement, its numbers by configuration, and its tables."""

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_cg.arguments.schema import PACKAGES
from megatron_cg.tools.bench.configurations import CONFIGURATIONS
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.version import __version__

SCHEMA = {"name": "megatron_cg.bench", "version": 4}
"""Versions 1 to 3 were those of another measurement."""
_PEAKS = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0}
"""Dense BF16 TFLOP/s by the whole name: those of other cards (PCIe, NVL) are lower."""
_UNKNOWN = "-"


def machine() -> dict[str, Any]:
    """GPUs by name with their driver, cores, and versions; never the name of the host."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60)
        rows = [line.rsplit(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    except (OSError, subprocess.SubprocessError):
        rows = []
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "gpus": [name for name, _ in rows],
        "driver": rows[0][1] if rows else None,
        "versions": versions | {"megatron-cg": __version__},
    }


def summaries(results: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The numbers of each configuration that has any, in the order of ``names``.

    Ratios are to the first of them, within a round, because machines drift. What no log has is
    None.
    """
    timed = [run for run in results["runs"] if not run["error"]]
    runs = {name: [run for run in timed if run["configuration"] == name] for name in names}
    made = {name: found for name, found in runs.items() if found}
    base = {run["round"]: _median(run["step_ms"]) for run in next(iter(made.values()), ())}
    peak = _PEAKS.get(next(iter(results["machine"]["gpus"]), ""))
    return {name: _summary(found, base, peak) for name, found in made.items()}


def _summary(
    runs: Sequence[Mapping[str, Any]], base: Mapping[int, Any], peak: float | None
) -> dict[str, Any]:
    """Of the rounds of one configuration; ``base`` has the median step of the first one's."""
    times = [time for run in runs for time in run["step_ms"]]
    quarters = statistics.quantiles(times, method="inclusive") if len(times) > 1 else times
    medians = {run["round"]: statistics.median(run["step_ms"]) for run in runs}
    ratios = [median / base[number] for number, median in medians.items() if number in base]
    tflops = _median([value for run in runs for value in run["tflops"]])
    return {
        "ms": statistics.median(times),
        "ms_quartiles": [quarters[0], quarters[-1]],
        "ms_of_rounds": [*medians.values()],
        "tflops": tflops,
        "mfu": tflops / peak if tflops is not None and peak else None,
        "tokens": _median([run["tokens"] for run in runs if run["tokens"] is not None]),
        "allocated_mib": max(run["allocated_mib"] or 0 for run in runs) or None,
        "reserved_mib": max(run["reserved_mib"] or 0 for run in runs) or None,
        "ratio": _median(ratios),
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def print_results(results: dict[str, Any]) -> None:
    here = results["machine"]
    gpus = here["gpus"]
    kinds = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    versions = ", ".join(f"{name} {found}" for name, found in here["versions"].items() if found)
    print(f"\n{kinds or 'no GPU found'}, driver {here['driver']}; {versions}\n")
    if results["summary"]:
        print(_table(_step_rows(results)))
    for run in results["runs"]:
        if run["error"]:
            print(f"\n{run['configuration']} failed in round {run['round']}: {run['error']}")


def _step_rows(results: dict[str, Any]) -> list[list[str]]:
    first = next(iter(results["summary"]))
    head = ["run", "captured", "ms a step", "quartiles", f"of {first}", "TFLOP/s per GPU", "MFU"]
    rows = [[*head, "tokens/s per GPU", "allocated MiB", "reserved MiB"]]
    of_runs = {run["configuration"]: run["captured"] for run in results["runs"]}
    for name, found in results["summary"].items():
        low, high = found["ms_quartiles"]
        rows.append(
            [
                f"{name}: {CONFIGURATIONS[name].title}",
                of_runs[name] or _UNKNOWN,
                f"{found['ms']:.1f}",
                f"{low:.1f} to {high:.1f}",
                _ratio(found),
                _number(found["tflops"], ".1f"),
                _number(found["mfu"], ".1%"),
                _number(found["tokens"], ",.0f"),
                _number(found["allocated_mib"], ",.0f"),
                _number(found["reserved_mib"], ",.0f"),
            ]
        )
    return rows


def _ratio(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return _UNKNOWN
    low, high = found["ratio_range"]
    spread = f" ({low:.3f} to {high:.3f})" if len(found["ms_of_rounds"]) > 1 else ""
    return f"{found['ratio']:.3f}{spread}"


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
