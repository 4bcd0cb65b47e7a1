"""Small traces made by hand, and one made by torch, become busy time, waits and launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_cg.tools.bench import BenchError
from megatron_cg.tools.bench.measure.watching import PhaseTimes, watching
from megatron_cg.tools.bench.traces.busy import busy_metrics
from megatron_cg.tools.bench.traces.idle import STEPS, analyse
from megatron_cg.tools.bench.traces.intervals import covered_until, gaps, length, union
from megatron_cg.tools.bench.traces.timeline import (
    DEVICE,
    OUTSIDE,
    PREFIX,
    parse_timeline,
    read_timeline,
)

MAIN, BACKWARD = 1, 2


def device(name: str, start: float, end: float, stream: int, correlation: int) -> dict[str, Any]:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return event(name, category, start, end, 0, stream, correlation)


def host(
    name: str, start: float, end: float, thread: int = MAIN, correlation: int | None = None
) -> dict[str, Any]:
    category = "cpu_op"
    if name.startswith(PREFIX):
        category = "user_annotation"
    elif name.startswith("cu"):
        category = "cuda_runtime"
    return event(name, category, start, end, 99, thread, correlation)


def event(
    name: str, category: str, start: float, end: float, pid: int, tid: int, correlation: int | None
) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "args": args} | times


TRACE: dict[str, list[dict[str, Any]]] = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0},
        event("cg: forward", "gpu_user_annotation", 0, 500, 0, 7, None),
        device("gemm", 100, 200, 7, 1),
        # On another stream, over the end of the first and beyond it.
        device("ncclDevKernel_AllGather", 150, 260, 20, 2),
        # 40 us nobody computes, then a graph of two kernels that touch.
        device("norm", 300, 320, 7, 3),
        device("add", 320, 340, 7, 3),
        # 60 us that the GPU waits for nothing of the host: the copy was launched long before.
        device("Memcpy DtoD", 400, 410, 7, 4),
        host(STEPS, 0, 1000),
        host("cg: forward", 80, 310),
        host("aten::mm", 85, 110),
        host("cudaLaunchKernel", 90, 95, correlation=1),
        host("cudaLaunchKernelExC", 120, 125, correlation=2),
        host("cg: unshard", 240, 290),
        host("aten::copy_", 250, 280),
        host("cudaGraphLaunch", 285, 299, correlation=3),
        host("cudaMemcpyAsync", 311, 312, correlation=4),
        host("cudaStreamSynchronize", 500, 700),
        host("autograd::engine::evaluate_function: MmBackward0", 265, 290, BACKWARD),
        # A call of the driver made inside one of the runtime.
        event("cuLaunchKernelEx", "cuda_driver", 91, 94, 99, MAIN, 1),
    ]
}


def test_a_union_counts_no_moment_twice() -> None:
    merged = union(np.array([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9)], float))
    assert merged.tolist() == [[0, 4], [5, 6]]
    assert length(merged) == 5 and gaps(merged).tolist() == [[4, 5]]
    moments = np.array([-1, 1, 4.5, 5.5, 9])
    assert covered_until(merged, moments).tolist() == [0, 1, 4, 4.5, 5]
    nothing = union(np.empty((0, 2)))
    assert not len(nothing) and not len(gaps(nothing)) and not covered_until(nothing, moments).any()


def test_the_device_alone_has_metrics_by_step_and_nothing_of_operators() -> None:
    """Of the calls of CUDA, which such a trace has, and of the device's work."""
    calls = [e for e in TRACE["traceEvents"] if e.get("cat") not in ("cpu_op", "user_annotation")]
    found = busy_metrics(parse_timeline({"traceEvents": calls}), steps=1)
    assert found == pytest.approx(
        {
            "steps": 1,
            "window_ms": 0.310,
            "busy_ms": 0.210,
            "busy_without_nccl_ms": 0.150,
            "nccl_ms": 0.110,
            "exposed_nccl_ms": 0.060,
            "idle_ms": 0.100,
            "idle_for_host_ms": 0.040,
            "longest_gap_ms": 0.060,
            **{"kernels": 4, "gaps": 2, "kernel_launches": 2, "graph_launches": 1},
        }
    )
    whole = analyse(parse_timeline(TRACE), steps=1)
    assert set(whole) - set(found) == {"idle_by_launch", "idle_by_host_work"}
    assert {name: whole[name] for name in found} == found
    half = busy_metrics(parse_timeline({"traceEvents": calls}), steps=2)
    per_step = found.keys() - {"steps", "longest_gap_ms"}
    assert {name: half[name] * 2 for name in per_step} == {name: found[name] for name in per_step}


def test_nccl_is_exposed_where_nothing_else_runs() -> None:
    kernels = [
        device("gemm", 0, 100, 7, 1),
        # 20 us under the first, 30 alone, 50 under the second; two at once count once.
        device("ncclDevKernel_AllGather", 80, 180, 20, 2),
        device("ncclDevKernel_ReduceScatter", 90, 140, 21, 3),
        device("gemm", 130, 170, 7, 4),
        device("Memcpy DtoD", 160, 200, 8, 5),
        # All alone, after a gap.
        device("ncclDevKernel_AllReduce", 210, 225, 20, 6),
    ]
    found = busy_metrics(parse_timeline({"traceEvents": kernels}), steps=2)
    assert found["nccl_ms"] == pytest.approx(0.115 / 2)
    assert found["exposed_nccl_ms"] == pytest.approx((0.030 + 0.015) / 2)
    assert found["busy_without_nccl_ms"] == pytest.approx(0.170 / 2)
    assert found["busy_ms"] == pytest.approx(0.215 / 2)


def test_without_calls_of_cuda_nothing_is_told_of_them() -> None:
    kernels = [e for e in TRACE["traceEvents"] if e.get("cat") in DEVICE]
    found = busy_metrics(parse_timeline({"traceEvents": kernels}), steps=1)
    assert found["idle_ms"] == pytest.approx(0.100) and found["gaps"] == 2
    assert not {"kernel_launches", "graph_launches", "idle_for_host_ms"} & set(found)


def test_a_gap_is_put_down_to_the_call_that_ended_it() -> None:
    rows = analyse(parse_timeline(TRACE), steps=1)["idle_by_launch"]
    # The GPU waited for another stream, and then for the host.
    names = ("thread", "phase", "launched_by", "launched_late", "ms", "gaps")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("main", "steps", "steps", False, pytest.approx(0.060), 1),
        ("main", "unshard", "unshard", True, pytest.approx(0.040), 1),
    ]
    kernels = [device("a", 0, 10, 7, 1), device("b", 30, 40, 7, 2)]
    (row,) = analyse(parse_timeline({"traceEvents": kernels}), steps=1)["idle_by_launch"]
    assert row["ms"] == 0.020 and row["launched_by"] == "?" and not row["launched_late"]


def test_what_each_thread_did_meanwhile_is_summed_by_its_innermost_event() -> None:
    rows = analyse(parse_timeline(TRACE), steps=1)["idle_by_host_work"]
    found = {(row["thread"], row["phase"], row["what"]): row["ms"] * 1e3 for row in rows}
    # 260 to 300: 20 in the copy, 5 more of Python in its phase, then the launch.
    assert found["main", "unshard", "aten::copy_"] == pytest.approx(20)
    assert found["main", "unshard", "unshard"] == pytest.approx(5)
    assert found["main", "unshard", "cudaGraphLaunch"] == pytest.approx(5)
    evaluate = "autograd::engine::evaluate_function: MmBackward0"
    assert found["backward", OUTSIDE, evaluate] == pytest.approx(25)
    main = sum(ms for (thread, _, _), ms in found.items() if thread == "main")
    assert main == pytest.approx(100)


def test_an_event_that_ends_after_the_one_around_it_is_cut() -> None:
    """As the clock's resolution makes it; what lies beyond is only Python's."""
    gpu = [device("a", 0, 1, 7, 1), device("b", 31, 32, 7, 2)]
    cpu = [host(STEPS, 0, 31), host("cg: a", 1, 11), host("late", 9, 13), host("op", 3, 8)]
    rows = analyse(parse_timeline({"traceEvents": gpu + cpu}), 1)["idle_by_host_work"]
    assert [(row["phase"], row["what"], round(row["ms"] * 1e3)) for row in rows] == [
        *(("steps", "steps", 20), ("a", "op", 5), ("a", "a", 3), ("a", "late", 2))
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "cannot be read|can be read"), ("[]", "no list traceEvents"), ("{}", "no list")],
)
def test_what_is_no_trace_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=words):
        read_timeline(path)
    with pytest.raises(BenchError, match="nowhere is not a trace"):
        read_timeline(tmp_path / "nowhere")


def test_a_trace_without_work_of_a_gpu_is_refused() -> None:
    with pytest.raises(BenchError, match="no kernel in the trace"):
        analyse(parse_timeline({"traceEvents": [host("aten::mm", 0, 1)]}), 1)


def test_torch_writes_what_is_read(tmp_path: Path) -> None:
    """A real trace of the CPU: operators lie inside the ranges of phases."""

    def phase() -> None:
        torch.ones(3).add_(1)

    path = tmp_path / "trace.json"
    ranges = PhaseTimes(lambda name: record_function(PREFIX + name))
    with (
        profile(activities=[ProfilerActivity.CPU]) as prof,
        watching({phase.__code__: "p"}, ranges),
    ):
        phase()
    prof.export_chrome_trace(str(path))
    (events,) = read_timeline(path).host.values()
    assert next(event.phase for event in events if event.name == "aten::add_") == "p"
