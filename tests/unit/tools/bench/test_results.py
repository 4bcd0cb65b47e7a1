"""Results become metrics, tables, lines through scaling runs, comparisons and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.results.bench_plots import host_stack, write_pngs
from megatron_cg.tools.bench.results.comparing import compare
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.metrics import joined, tables
from megatron_cg.tools.bench.results.scaling import trends
from megatron_cg.tools.bench.runs.configurations import DDP_GRAPHS, EAGER, GRAPHS
from megatron_cg.tools.bench.runs.store import (
    FAILED,
    FILE,
    LEFT_OUT,
    SCHEMA,
    keep,
    kept,
    newest,
    read,
    write,
)

Make = Callable[..., dict[str, Any]]
NO_RUNS: list[dict[str, Any]] = [{}, {"runs": 3}, {"runs": [3]}, {"runs": [{"key": {}}]}]


def of(made: dict[str, Any], *names: str) -> list[Any]:
    """Metrics of one run."""
    found = joined([made])
    return [found[name] for name in names]


GPU = ("busy", "busy_without_nccl", "exposed_nccl", "idle", "idle_for_host", "longest_gap")
PEAKS = ("capture_peak", "peak_allocated", "peak_reserved")


def test_metrics_of_a_run(result: Make) -> None:
    made = result(GRAPHS)
    assert of(made, "step", "quartiles", "least", "most") == [102.0, [101.0, 104.0], 100.0, 110.0]
    assert of(made, *GPU) == [50.0, 45.0, 5.0, 20.0, 15.0, 2.5]
    assert of(made, "step_per_busy", "kernel_launches") == [pytest.approx(2.04), 900]
    assert of(made, "capture_seconds", "capture_without_warmup") == [5.0, 1.5]
    assert of(made, *PEAKS, "bytes_per_replay", "loss") == [1500, 1000, 1200, 1000, 5.5]
    assert of(result(GRAPHS, (7.0,)), "quartiles") == [[7.0, 7.0]]


def test_without_a_trace_of_the_device_alone_the_other_one_is_told(result: Make) -> None:
    old = result(GRAPHS)
    del old["device_trace"]
    for made in (old, result(GRAPHS, device_trace=None)):
        assert of(made, *GPU) == [52.0, 40.0, None, 70.0, 60.0, 7.5]
        assert of(made, "step_per_busy", "device_alone") == [pytest.approx(102 / 52), False]
    # Metrics of one trace are not filled up from the other.
    made = result(GRAPHS, device_trace={"busy_ms": 50.0, "idle_ms": 20.0})
    assert of(made, *GPU, "kernel_launches") == [50.0, None, None, 20.0, None, None, None]


def test_memory_is_that_of_the_rank_that_needs_most(result: Make) -> None:
    made = json.loads(json.dumps(result(GRAPHS)))
    made["ranks"][1]["timed"]["memory"]["peak_allocated"] *= 2
    made["ranks"][1]["captures"][0]["memory"]["peak_allocated"] *= 3
    assert of(made, *PEAKS) == [4500, 2000, 1200]


def test_a_run_that_wrote_nothing_has_no_metrics(result: Make) -> None:
    assert not any(joined([result(ranks=[], trace=None, device_trace=None)]).values())


def test_a_run_that_failed_keeps_what_it_measured(result: Make) -> None:
    made = result(GRAPHS, trace=None, device_trace=None, status=FAILED)
    del made["ranks"][0]["probed"]
    assert of(made, "step", "busy") == [102.0, None]


def test_a_table_has_all_configurations_of_one_point_and_their_ratios(result: Make) -> None:
    eager = result(EAGER, steps=(200.0,) * 3)
    runs = [result(DDP_GRAPHS), result(GRAPHS), eager, result(GRAPHS, grouped_gemm="cutlass")]
    one, other = tables(runs)
    assert [row.name for row in one] == [EAGER, GRAPHS, DDP_GRAPHS]
    assert [row.ratio("step") for row in one] == pytest.approx([1, 0.51, 0.51])
    assert [row.ratio("step") for row in other] == [None]


def scaled(result: Make) -> list[dict[str, Any]]:
    """A step of 20 ms and 10 more for each layer, at three sizes."""
    return [
        result(
            GRAPHS, (20.0 + 10 * n,) * 3, layers=n, dimension="layers", invocation="s", began=str(n)
        )
        for n in (4, 8, 16)
    ]


def test_scaling_runs_become_lines(result: Make) -> None:
    found = {trend.metric: trend for trend in trends([*scaled(result), result(GRAPHS)])}
    step = found["step"]
    assert (step.configuration, step.dimension) == (GRAPHS, "layers")
    assert step.points == ((4, 60), (8, 100), (16, 180))
    assert (step.offset, step.slope) == pytest.approx((20, 10))
    assert step.residual == pytest.approx(0) and found["capture"].slope == pytest.approx(0)
    assert trends(scaled(result)[:1]) == []


def test_a_line_is_the_nearest_and_says_how_near(result: Make) -> None:
    points = ((1, 1), (2, 3), (3, 3))
    bent = [result(EAGER, (y,), layers=x, dimension="layers") for x, y in points]
    step = trends(bent)[0]
    assert (step.offset, step.slope, step.residual) == pytest.approx((1 / 3, 1, 1 / 3))


def test_results_are_compared_by_key(result: Make) -> None:
    old = [result(GRAPHS, steps=(204.0,) * 3), result(DDP_GRAPHS)]
    changes = compare(old, [result(GRAPHS), result(EAGER)])
    steps = [change for change in changes if change.metric == "step ms"]
    assert [(change.old, change.new) for change in steps] == [(204.0, 102.0)]
    assert {change.name for change in changes} == {"llama.default.8layers-2mb-2gpus.fsdp-graphs"}


def test_what_different_traces_tell_is_not_compared_without_a_word(result: Make) -> None:
    old = result(GRAPHS)
    del old["device_trace"]
    found = {change.metric: change for change in compare([old], [result(GRAPHS)])}
    busy = found["GPU busy ms (old: traced with host events)"]
    assert (busy.old, busy.new) == (52.0, 50.0) and "GPU busy ms" not in found
    assert "step / busy (old: traced with host events)" in found and "step ms" in found
    for one in (old, result(GRAPHS)):
        assert "GPU busy ms" in {change.metric for change in compare([one], [one])}


def test_the_newest_run_of_a_key_is_kept(result: Make) -> None:
    first = result(GRAPHS, began="2026-01-01", seconds=1.0)
    second = result(GRAPHS, began="2026-01-02", seconds=2.0)
    none = result(GRAPHS, began="2026-01-03", status=LEFT_OUT)
    assert newest([second, none, first]) == [second]
    assert newest([none]) == [none]
    assert len(newest([first, result(GRAPHS, dimension="layers")])) == 2


def test_rounds_are_kept_and_take_the_place_of_their_own_kind(result: Make) -> None:
    old = result(GRAPHS, began="2026-01-01")
    first, second = (
        result(GRAPHS, round=n, invocation="two", began=f"2026-01-02T0{n}") for n in (1, 2)
    )
    eager = result(EAGER, began="2026-01-01")
    # A run without a round is of the first.
    assert newest([old, first]) == [first]
    assert newest([first, second, eager]) == [eager, first, second]
    assert newest([first, {**second, "began": "2026-01-02T03"}, second])[1]["began"][-1] == "3"
    # A later invocation with fewer rounds is not mixed with what an earlier one measured.
    again = result(GRAPHS, invocation="three", began="2026-01-03")
    assert newest([first, second, again]) == [again]
    left = result(GRAPHS, round=2, invocation="three", began="2026-01-04", status=LEFT_OUT)
    assert newest([first, second, again, left]) == [again, left]
    assert newest([first, second, left]) == [first, second]


def test_results_on_disk_are_joined(result: Make, tmp_path: Path) -> None:
    assert kept(tmp_path) == []
    write([result(EAGER)], tmp_path / FILE)
    path = keep(result(GRAPHS, invocation="two"), tmp_path)
    assert path.name == "llama.default.8layers-2mb-2gpus.fsdp-graphs.two.json"
    assert [found["key"]["contender"] for found in kept(tmp_path)] == [EAGER, GRAPHS]
    assert json.loads((tmp_path / "bench.json").read_text())["schema"] == SCHEMA
    path = keep(result(GRAPHS, round=2, invocation="two"), tmp_path)
    assert path.name == "llama.default.8layers-2mb-2gpus.fsdp-graphs.round2.two.json"
    assert len(kept(tmp_path)) == 3


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_earlier_versions_are_read_and_shown(
    version: int, result: Make, tmp_path: Path
) -> None:
    path = write([result(EAGER), result(GRAPHS)], tmp_path / FILE)
    old = json.loads(path.read_text())
    old["schema"]["version"] = version
    for run in old["runs"]:
        del run["device_trace"]
    path.write_text(json.dumps(old))
    assert read(path) == old["runs"]
    assert "| 52.0 \u2021 |" in as_markdown(read(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "schema None"),
        ('{"schema": {"version": 9}}', "'version': 9"),
        *((json.dumps({"schema": SCHEMA, **runs}), "no list of whole runs") for runs in NO_RUNS),
    ],
)
def test_other_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=words):
        read(path)


def test_a_configuration_that_this_version_does_not_have_is_named(
    result: Make, tmp_path: Path
) -> None:
    made = result(GRAPHS)
    path = write([made | {"key": made["key"] | {"contender": "gone"}}], tmp_path / FILE)
    with pytest.raises(BenchError, match="configuration gone, which this version does not have"):
        read(path)
    path = write([made | {"key": {"contender": GRAPHS}}], tmp_path / FILE)
    with pytest.raises(BenchError, match="no list of whole runs"):
        read(path)


def test_host_time_is_stacked_with_what_is_left(result: Make) -> None:
    ((row,),) = tables([result(GRAPHS)])
    assert host_stack(row) == {"forward": 40.0, "other": 80.0}
    bare = result(GRAPHS)
    del bare["ranks"][0]["probed"]
    ((row,),) = tables([bare])
    assert host_stack(row) == {}


def test_pictures_are_drawn_of_tables_and_scaling_runs(result: Make, tmp_path: Path) -> None:
    runs = [result(EAGER), result(GRAPHS), *scaled(result)]
    files = write_pngs(runs, trends(runs), tmp_path)
    assert [path.name for path in files] == [
        "llama.default.8layers-2mb-2gpus.step.png",
        "llama.default.8layers-2mb-2gpus.memory.png",
        "llama.default.8layers-2mb-2gpus.host.png",
        "scaling.llama.default.layers.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
