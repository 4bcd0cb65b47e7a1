"""Runs one call of ``megatron-cg bench``: the runs in turn, their logs, the table, the JSON.

Relied on: megatron-core 0.19.2, ``training_log``, ``report_memory`` and ``_print_args``.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_cg.__main__ import CACHE_ENTRIES, CACHE_VARIABLE
from megatron_cg.arguments.schema import PACKAGES
from megatron_cg.files import whole_file
from megatron_cg.tools.align.presets import load_preset
from megatron_cg.tools.align.run import (
    DETERMINISTIC_ENVIRONMENT,
    PACKAGE,
    Run,
    environment,
    from_text,
    log_tail,
    python_sources,
    torch_cudnn,
)
from megatron_cg.tools.bench.configurations import (
    CONFIGURATIONS,
    BenchError,
    captured,
    chosen,
    edited,
    given_line,
    preset_line,
)
from megatron_cg.tools.launch_line import LaunchLine
from megatron_cg.upstream.symbols import installed_version
from megatron_cg.version import __version__

INCOMPLETE = 3  # the exit code when a run failed
_SETTINGS = ("settle_steps", "steps", "log_interval")
_TAIL = 20  # lines of a failed run's log
SCHEMA = {"name": "megatron_cg.bench", "version": 4}
"""Versions 1 to 3 were those of another measurement."""
_PEAKS = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0}
"""Dense BF16 TFLOP/s by the whole name: those of other cards (PCIe, NVL) are lower."""

# Ranks write to one log, so nothing is asked of the beginnings of lines.
_STEP = re.compile(
    r" iteration +(?P<iteration>\d+)/ *\d+ \|.*"
    r" elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r"(?: throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \|)?.*"
    r" global batch size: +(?P<batch>\d+) \|(?:.* lm loss: (?P<loss>\S+) \|)?"
)
_MEMORY = re.compile(
    r"memory \(MB\) .*\| max allocated: (?P<allocated>[\d.]+)"
    r" .*\| max reserved: (?P<reserved>[\d.]+)"
)
_ARGUMENT = re.compile(r"\b(seq_length|world_size) \.{2,} (\d+)")


def invoke(args: argparse.Namespace, extra: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="megatron-cg-bench-") as temporary:
        folder = (args.work_dir or Path(temporary)).resolve()
        line = _line(args, extra, folder)
        names = chosen(args.only, line)
        runs = _planned(args, line, names)
        if args.dry_run:
            for name, number, line in runs:
                print(f"# {name}.{number}\n{shlex.join(line.command)}")
            return 0
        if not (here := machine())["gpus"]:
            text = "nvidia-smi finds no GPU: start it where there are some. --dry-run prints its"
            raise BenchError(f"{text} lines anywhere, and megatron-cg plan computes the memory.")
        results: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": here,
            "settings": {name: getattr(args, name) for name in _SETTINGS},
            "runs": [],
        }
        _write(args.out, results)  # It may not be writable, and the runs take long.
        for run in runs:
            results["runs"].append(_made(*run, folder, args))
            results["summary"] = summaries(results, names)
            _write(args.out, results)
    print_results(results)
    if args.out is not None:
        print(f"written: {args.out}")
    return INCOMPLETE if any(run["error"] for run in results["runs"]) else 0


def _write(out: Path | None, results: Mapping[str, Any]) -> None:
    if out is not None:
        with whole_file(out) as part:
            part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _line(args: argparse.Namespace, extra: Sequence[str], folder: Path) -> LaunchLine:
    if args.preset is None:
        return given_line(extra)
    preset = load_preset(args.preset)
    return preset_line(
        preset,
        from_text(python_sources(), folder / "data"),
        nproc=args.nproc or preset.nproc,
        microbatches=args.microbatches,
        steps=args.settle_steps + args.steps,
        extra=extra,
    )


def _planned(
    args: argparse.Namespace, line: LaunchLine, names: Sequence[str]
) -> list[tuple[str, int, LaunchLine]]:
    """The runs in their order. Every other round is in reverse, against a steady drift."""
    steps = args.settle_steps + args.steps
    return [
        (name, number, edited(line, name, steps=steps, every=args.log_interval))
        for number in range(1, args.rounds + 1)
        for name in (names if number % 2 else reversed(names))
    ]


def _made(
    name: str, number: int, line: LaunchLine, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Make one run; returns what is known of it, for JSON. A failure is printed."""
    # Without our launcher too, cuBLASLt's cache is as large as with it.
    env = {CACHE_VARIABLE: str(CACHE_ENTRIES), **os.environ}
    if args.preset is not None:
        like_align = environment(env, root=PACKAGE.parent, cudnn=torch_cudnn())
        env = {n: value for n, value in like_align.items() if n not in DETERMINISTIC_ENVIRONMENT}
    run = Run(f"{name}.{number}", line.command, env, folder / f"{name}.{number}")
    made: dict[str, Any] = {"configuration": name, "round": number, "captured": captured(line)}
    made |= {"command": line.command, "error": ""}
    failure, text = run.make(args.timeout), run.text()
    try:
        if failure:
            raise BenchError(failure)
        made |= read_log(text, settle=args.settle_steps, steps=args.steps, every=args.log_interval)
    except BenchError as error:
        made["error"] = str(error)
        made["tail"] = log_tail(text).splitlines()[-_TAIL:]
        print(*made["tail"], sep="\n", file=sys.stderr)
        print(f"the run {run.name} failed: {error}", file=sys.stderr, flush=True)
    return made


def read_log(text: str, *, settle: int, steps: int, every: int = 1) -> dict[str, Any]:
    """What a run's log says of ``steps`` steps after the first ``settle`` ones, for JSON.

    ``step_ms`` and ``tflops`` (per GPU, as Megatron counts operations) of each line, the mean of
    ``every`` so many steps, none of them a first one; ``tokens`` per second and GPU in a step of
    median length; ``allocated_mib`` and ``reserved_mib`` (the peaks of torch's allocator since the
    start, on the printed rank that has most); and the last ``loss``. What the log has not is None.
    Raises BenchError if it has fewer steps.
    """
    lines = list(_STEP.finditer(text))
    begin, end = settle + every, settle + steps
    timed = [line for line in lines if begin <= int(line["iteration"]) <= end]
    if not timed or len(timed) < end // every - (begin - 1) // every:
        raise BenchError(
            f"the log has {len(lines)} steps, and {settle} + {steps} were asked for: give a "
            "smaller --settle-steps or --steps, or a longer training"
        )
    times = [float(line["ms"]) for line in timed]
    sizes = {name: int(number) for name, number in _ARGUMENT.findall(text)}
    tokens = None
    if len(sizes) == 2:
        batch = int(timed[-1]["batch"]) * sizes["seq_length"] / sizes["world_size"]
        tokens = batch / statistics.median(times) * 1e3
    peaks = list(_MEMORY.finditer(text))
    return {
        "step_ms": times,
        "tflops": [float(line["tflops"]) for line in timed if line["tflops"]],
        "tokens": tokens,
        "allocated_mib": max((float(peak["allocated"]) for peak in peaks), default=None),
        "reserved_mib": max((float(peak["reserved"]) for peak in peaks), default=None),
        "loss": float(timed[-1]["loss"]) if timed[-1]["loss"] else None,
    }


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
    print(f"\n{kinds}, driver {here['driver']}; {versions}\n")
    if results["summary"]:
        print(_table(_rows(results)))
    for run in results["runs"]:
        if run["error"]:
            print(f"\n{run['configuration']} failed in round {run['round']}: {run['error']}")


def _rows(results: dict[str, Any]) -> list[list[str]]:
    first = next(iter(results["summary"]))
    head = ["run", "captured", "ms a step", "quartiles", f"of {first}", "TFLOP/s per GPU", "MFU"]
    rows = [[*head, "tokens/s per GPU", "allocated MiB", "reserved MiB"]]
    of_runs = {run["configuration"]: run["captured"] for run in results["runs"]}
    forms = {"tflops": ".1f", "mfu": ".1%", "tokens": ",.0f"}
    forms |= {"allocated_mib": ",.0f", "reserved_mib": ",.0f"}
    for name, found in results["summary"].items():
        low, high = found["ms_quartiles"]
        cells = [f"{found['ms']:.1f}", f"{low:.1f} to {high:.1f}", _ratio(found)]
        for key, form in forms.items():
            cells.append("-" if found[key] is None else format(found[key], form))
        rows.append([f"{name}: {CONFIGURATIONS[name].title}", of_runs[name] or "-", *cells])
    return rows


def _ratio(found: dict[str, Any]) -> str:
    if found["ratio"] is None:
        return "-"
    low, high = found["ratio_range"]
    spread = f" ({low:.3f} to {high:.3f})" if len(found["ms_of_rounds"]) > 1 else ""
    return f"{found['ratio']:.3f}{spread}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)
