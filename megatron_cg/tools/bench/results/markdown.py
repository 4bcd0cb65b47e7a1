"""Formats all results as Markdown tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_cg.tools.bench.results.ablation import ablation_lines
from megatron_cg.tools.bench.results.comparing import Change
from megatron_cg.tools.bench.results.grids import NONE, grid, number
from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.overheads import overhead_lines
from megatron_cg.tools.bench.results.rounds_text import (
    ELSEWHERE,
    against_lines,
    baseline_note,
    failure_lines,
    has_ratios_from_elsewhere,
    in_several_rounds,
    medians_cell,
    ratio_bases,
    ratio_cell,
    ratio_titles,
    status_label,
)
from megatron_cg.tools.bench.results.scaling import Trend
from megatron_cg.tools.bench.runs.bench_machine import described
from megatron_cg.tools.bench.runs.bench_schedule import round_of
from megatron_cg.tools.bench.runs.configurations import ABLATIONS, KNOWN
from megatron_cg.tools.bench.runs.store import Result

_TIMES = ("configuration", "step ms, median", "IQR", "least to most", "later / earlier")
_GPU = (
    "GPU busy ms",
    "without NCCL",
    "exposed NCCL",
    "step / busy",
    "idle ms (traced)",
    "of it for the host",
    "longest gap ms",
    "launches",
    "graphs",
)
WITH_HOST = " \u2021"
"""Marks metrics from a trace with host events, used when there is no device-only trace."""
_HALVES = (
    '"later / earlier" is of the timed steps\' halves. Where it is not near 1 the steps are not '
    "steady: with experts, new numbers of tokens cost the host time (more --settle-steps)."
)
_TRACED = (
    'From "GPU busy ms" on: rank 0, in steps of which only the GPU\'s work and the calls of CUDA '
    "were traced, so that the host is hardly slower. NCCL is exposed while nothing else runs on "
    "the GPU."
)
_WITH_HOST = (
    "Marked \u2021: in steps traced with all events of the host, which slow it. Idle time can be "
    "much longer than in the timed steps, and NCCL overlap less."
)


def as_markdown(
    results: Sequence[Result], trends: Sequence[Trend] = (), changes: Sequence[Change] = ()
) -> str:
    """The whole report."""
    lines = ["# megatron-cg bench", ""]
    for heading, rows in _headed(results):
        lines += [f"## {heading}", "", *_notes(rows)]
        usual = [row for row in rows if row.name not in ABLATIONS]
        lines += [*_step_lines(rows), "", *_step_notes(rows), *against_lines(usual)]
        lines += [*grid(_memory_titles(rows), [_memory_cells(row) for row in rows]), ""]
        lines += ablation_lines(rows)
        lines += _phase_lines(usual)
        lines += overhead_lines(usual)
        lines += _idle_lines(usual)

        lines += failure_lines(rows)
    lines += _trend_lines(trends)
    lines += _change_lines(changes)
    lines += _run_lines(results)
    return "\n".join(lines).rstrip() + "\n"


def _headed(results: Sequence[Result]) -> list[tuple[str, list[Row]]]:
    return [(heading(rows[0].result), rows) for rows in tables(results)]


def heading(result: Result) -> str:
    """The shape and size of a table."""
    key = result["key"]
    size = f"{key['layers']} layers, {key['microbatches']} microbatches, {key['nproc']} processes"
    gemm = f", grouped GEMM {key['grouped_gemm']}"
    grown = f" (scaling by {key['dimension']})" if key["dimension"] else ""
    return f"{key['shape']}: {size}{gemm}{grown}"


def _notes(rows: Sequence[Row]) -> list[str]:
    made = (result for row in rows for result in row.rounds if result["ranks"])
    result = next(made, None)
    if result is None:
        return []
    first = result["ranks"][0]
    device = first["device"]
    libraries = {name: device[name] for name in ("cuda", "cudnn", "nccl") if device.get(name)}
    versions = {name: version for name, version in first["versions"].items() if version}
    words = ", ".join(f"{name} {version}" for name, version in (versions | libraries).items())
    scopes = " ".join(result["settings"]["scopes"]) or "whole layers"
    lines = [f"{described(result['machine'])}; {words}. Scopes: {scopes}."]
    if result.get("notice"):
        lines += ["", f"{result['notice']}."]
    if has_ratios_from_elsewhere(rows):
        lines += ["", "Ratios marked \u2020 are to a run that was not made side by side with it."]
    return [*lines, ""]


def _ratio(row: Row, value: float | None) -> str:
    mark = "" if row.same_invocation or value is None else ELSEWHERE
    return number(value, ".3f") + mark


def _step_lines(rows: Sequence[Row]) -> list[str]:
    """The table of steps, with each round's median if there are several."""
    cells = [_step_cells(row) for row in rows]
    titles = [*_TIMES, *ratio_titles(rows), *_GPU]
    if not in_several_rounds(rows):
        return grid(titles, cells)
    columns = [*titles[:2], "of each round", *titles[2:]]
    joined = zip(rows, cells, strict=True)
    return grid(columns, [[*own[:2], medians_cell(row), *own[2:]] for row, own in joined])


def _step_cells(row: Row) -> list[str]:
    found, step = row.metrics, row.metrics.step
    return [
        status_label(row),
        number(step.median if step else None),
        number(step.between if step else None, ",.2f"),
        f"{step.least:,.1f} to {step.most:,.1f}" if step else NONE,
        number(found.later_per_earlier, ".2f"),
        *(ratio_cell(row.step_ratio(base)) for base in ratio_bases(row)),
        _traced(row, found.busy),
        _traced(row, found.busy_without_nccl),
        _traced(row, found.exposed_nccl),
        _traced(row, found.step_per_busy, ".2f"),
        _traced(row, found.idle),
        _traced(row, found.idle_for_host),
        _traced(row, found.longest_gap, ",.2f"),
        number(found.kernel_launches, ",.0f"),
        number(found.graph_launches, ",.0f"),
    ]


def _traced(row: Row, value: float | None, form: str = ",.1f") -> str:
    mark = "" if row.metrics.device_alone or value is None else WITH_HOST
    return number(value, form) + mark


def _step_notes(rows: Sequence[Row]) -> list[str]:
    """Notes on which steps the metrics cover."""
    alone = {row.metrics.device_alone for row in rows if row.metrics.busy is not None}
    lines = [note] if (note := baseline_note(rows)) else []
    lines += [_HALVES] if any(row.metrics.later_per_earlier for row in rows) else []
    lines += [_TRACED] if True in alone else []
    lines += [_WITH_HOST] if False in alone else []
    return [line for words in lines for line in (words, "")]


def _memory_titles(rows: Sequence[Row]) -> list[str]:
    ratio = ratio_titles(rows)[0]
    loaded = ["load s", "compile s"] if _any_loaded(rows) else []
    return [
        *("configuration", "peak allocated MiB", ratio, "peak reserved MiB", ratio),
        *("allocated MiB", "peak in capture MiB", ratio, "capture s", "without warmup"),
        *loaded,
        *("bytes a replay", "last loss"),
    ]


def _any_loaded(rows: Iterable[Row]) -> bool:
    """Whether a row has layers that were compiled beforehand."""
    return any(row.metrics.load_seconds is not None for row in rows)


def _memory_cells(row: Row) -> list[str]:
    found = row.metrics
    loaded = (found.load_seconds, found.compile_seconds) if _any_loaded(row.table.values()) else ()
    base = row.baseline.metrics.peak_allocated if row.baseline else None
    in_capture = found.capture_peak / base if found.capture_peak and base else None
    return [
        status_label(row),
        number(found.peak_allocated, ",.0f"),
        _ratio(row, row.ratio(lambda f: f.peak_allocated)),
        number(found.peak_reserved, ",.0f"),
        _ratio(row, row.ratio(lambda f: f.peak_reserved)),
        number(found.allocated, ",.0f"),
        number(found.capture_peak, ",.0f"),
        _ratio(row, in_capture),
        number(found.capture_seconds, ",.2f"),
        number(found.capture_without_warmup, ",.2f"),
        *(number(seconds, ",.2f") for seconds in loaded),
        number(found.bytes_per_replay, ",.0f"),
        number(found.loss, ".6f"),
    ]


def _phase_lines(rows: Sequence[Row]) -> list[str]:
    """Host time by phase, from each configuration's own window of probed steps, rank 0."""
    probed = {row.name: row.result["ranks"][0].get("probed") for row in _measured(rows)}
    probed = {name: found for name, found in probed.items() if found}
    if not probed:
        return []
    cells: dict[tuple[str, str], dict[str, str]] = {}
    totals: dict[tuple[str, str], float] = {}
    for name, found in probed.items():
        for row in found["phases"]:
            key = (row["phase"], row["thread"])
            totals[key] = max(totals.get(key, 0.0), row["ms"])
            text = f"{row['ms']:,.1f} ({row['own_ms']:,.1f}; {row['calls']:,.0f})"
            cells.setdefault(key, {})[name] = text
    ordered = sorted(cells, key=lambda key: -totals[key])
    body = [
        [f"{phase} [{thread}]", *(cells[phase, thread].get(name, NONE) for name in probed)]
        for phase, thread in ordered
    ]
    steps = [f"{found['step_ms']:,.1f}" for found in probed.values()]
    body.append(["whole step, as probed", *steps])
    title = "Host time a step: ms (of it in no other phase, ms; calls)"
    return [f"{title}:", "", *grid(["phase [thread]", *probed], body), ""]


def _idle_lines(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for row in _measured(rows):
        trace = row.result["trace"]
        if not trace:
            continue
        how = f"traced with all events of the host: {number(trace['idle_ms'])} ms a step"
        lines += [f"{row.name}, what ended the GPU's idle time ({how}):", ""]
        body = [
            [
                f"{found['phase']} / {found['launched_by']} [{found['thread']}]",
                "host" if found["launched_late"] else "GPU",
                number(found["ms"], ",.2f"),
                number(found["gaps"], ",.1f"),
            ]
            for found in trace["idle_by_launch"][:8]
        ]
        lines += grid(["phase / launched by [thread]", "waited for", "ms a step", "gaps"], body)
        lines += ["", f"{row.name}, what the host did meanwhile:", ""]
        body = [
            [f"{found['phase']} / {found['what']} [{found['thread']}]", number(found["ms"], ",.2f")]
            for found in trace["idle_by_host_work"][:8]
        ]
        lines += [*grid(["phase / innermost [thread]", "ms a step"], body), ""]
    return lines


def _measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.result["ranks"]]


def _trend_lines(trends: Sequence[Trend]) -> list[str]:
    if not trends:
        return []
    body = [
        [
            f"{trend.shape}, {trend.configuration}, {trend.metric} ({trend.unit})",
            trend.dimension,
            ", ".join(f"{x:g}: {y:,.1f}" for x, y in trend.points),
            number(trend.line.offset, ",.2f"),
            number(trend.line.slope, ",.3f"),
            number(trend.line.residual, ".1%"),
        ]
        for trend in trends
    ]
    columns = ["metric", "by", "measured", "at 0", "for each", "farthest from the line"]
    return ["## Scaling", "", *grid(columns, body), ""]


def _change_lines(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return []
    body = [
        [
            f"{change.name}: {change.metric}",
            number(change.old, ",.2f"),
            number(change.new, ",.2f"),
            number(change.ratio, ".3f"),
        ]
        for change in changes
    ]
    return ["## Compared", "", *grid(["metric", "old", "new", "old / new"], body), ""]


def _run_lines(results: Sequence[Result]) -> list[str]:
    invocations = list(dict.fromkeys(result["invocation"] for result in results))
    letters = {name: _letter(index) for index, name in enumerate(invocations)}
    several = any(round_of(result["key"]) > 1 for result in results)
    body = [
        [
            f"{result['key']['shape']}, {result['key']['contender']}",
            str(result["key"]["grouped_gemm"]),
            *([str(round_of(result["key"]))] if several else []),
            letters[result["invocation"]],
            str(result["began"]),
            number(result["seconds"], ",.0f"),
            str(result["status"]),
        ]
        for result in results
    ]
    rounds = ["round"] if several else []
    columns = ["run", "grouped GEMM", *rounds, "made in", "began", "seconds", "status"]
    lines = ["## Runs", "", "Runs with the same letter were made in one invocation.", ""]
    lines += [*grid(columns, body), "", "Configurations:", ""]
    names = {result["key"]["contender"] for result in results}
    shown = (one for name, one in KNOWN.items() if name in names)
    return [*lines, *(f"- `{one.name}`: {one.description}" for one in shown)]


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"A{index}"
