"""The Markdown of a made-up benchmark is, to the letter, what ``report.md`` beside this file has.

``python -m tests.unit.tools.bench.test_report`` writes that file anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_cg.tools.bench.results.comparing import compare
from megatron_cg.tools.bench.results.markdown import as_markdown
from megatron_cg.tools.bench.results.scaling import trends
from megatron_cg.tools.bench.runs.configurations import (
    DDP_GRAPHS,
    EAGER,
    EXPERTS,
    GRAPHS,
    TORCH_EAGER,
)
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT
from tests.unit.tools.bench.made_up import made_result, several_rounds

REPORT = Path(__file__).with_name("report.md")


def rounds() -> list[dict[str, Any]]:
    """Three rounds of three configurations; one run failed at its end, and one was left out."""
    made = several_rounds()
    by_name = {(run["key"]["contender"], run["key"]["round"]): run for run in made}
    by_name[EAGER, 1] |= {"status": FAILED, "error": "gone", "tail": ["its", "last words"]}
    nothing: dict[str, Any] = {"ranks": [], "device_trace": None, "trace": None}
    by_name[DDP_GRAPHS, 2] |= {"status": LEFT_OUT, "error": "no time", **nothing}
    by_name[GRAPHS, 1]["notes"].append("a sampling profile is in samples/x")
    (first, _) = by_name[GRAPHS, 1]["ranks"]
    first["timed"]["counters"] |= {"guard_ns": 900_000, "inputs_copied": 8, "inputs_in_place": 4}
    first["timed"]["counters"] |= {"mismatched": 1}
    first["probed"]["phases"] += [
        {"phase": phase, "thread": "main", "calls": 2.0, "ms": ms, "own_ms": ms}
        for phase, ms in (("guard: around a replay", 0.5), ("votes", 0.75), ("votes: wait", 0.25))
    ]
    return made


def everything() -> str:
    """A report with every kind of table."""
    # Of another version, which kept sampled stacks, and not side by side with graphs.
    old = made_result(EAGER, shape="qwen3-moe", samples=[{"thread": "main"}], invocation="old")
    del old["device_trace"]
    grows = (100.0,) * 4 + (130.0,) * 4
    graphs = made_result(GRAPHS, grows, shape="qwen3-moe", notice="CPU tape")
    experts = made_result(EXPERTS, grouped_gemm="cutlass")
    torch_gemm = made_result(TORCH_EAGER, grouped_gemm="cutlass", trace=None, device_trace=None)
    grown = [
        made_result(
            *(GRAPHS, (20.0 + 10 * n,) * 3), layers=n, dimension="layers", trace=None, began=str(n)
        )
        for n in (4, 8)
    ]
    results = [*rounds(), old, graphs, torch_gemm, experts, *grown]
    earlier = [made_result(GRAPHS, (220.0,) * 3)]
    return as_markdown(results, trends(results), compare(earlier, results))


def test_the_report_is_as_it_was() -> None:
    assert everything() == REPORT.read_text(encoding="utf-8")


if __name__ == "__main__":
    REPORT.write_text(everything(), encoding="utf-8")
