"""The last table says in words which configuration is faster, and when that is not known."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from megatron_cg.tools.bench.results.metrics import Row, tables
from megatron_cg.tools.bench.results.summary import print_summary, summary, verdict
from megatron_cg.tools.bench.runs.configurations import EAGER, EXPERTS, GRAPHS, TORCH_EAGER
from megatron_cg.tools.bench.runs.store import FAILED, LEFT_OUT

Make = Callable[..., dict[str, Any]]
STEADY = (100.0,) * 8


def graphs_of(results: list[dict[str, Any]]) -> Row:
    (rows,) = tables(results)
    return next(row for row in rows if row.name == GRAPHS)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([50.0, 60.0], "45.0% less time a step"),
        ([120.0, 130.0], "25.0% more time a step"),
        ([90.0, 110.0], "no clear difference in 2 rounds"),
        ([100.0, 110.0], "no clear difference in 2 rounds"),
        ([50.0], "50.0% less time a step, of one round"),
    ],
)
def test_a_verdict_is_that_of_all_rounds(result: Make, steps: list[float], words: str) -> None:
    made = []
    for number, step in enumerate(steps, 1):
        made += [result(EAGER, STEADY, round=number), result(GRAPHS, (step,) * 8, round=number)]
    assert verdict(graphs_of(made)) == words


def test_a_verdict_names_what_makes_it_doubtful(result: Make) -> None:
    slower = (100.0,) * 4 + (120.0,) * 4
    eager = result(EAGER, STEADY)
    assert verdict(graphs_of([eager, result(GRAPHS, slower)])).endswith("; steps are not steady")
    other = result(GRAPHS, (50.0,) * 8, invocation="of another day")
    other["invocation"] = "of another day"
    assert verdict(graphs_of([eager, other])) == "50.0% less time a step, of another invocation"
    assert verdict(graphs_of([result(GRAPHS, STEADY)])) == "no fsdp-eager to compare with"
    (rows,) = tables([eager])
    assert verdict(rows[0]) == "the baseline"


def test_a_run_that_was_not_made_is_named(result: Make) -> None:
    failed = result(GRAPHS, status=FAILED, ranks=[], error="out of memory")
    assert verdict(graphs_of([result(EAGER), failed])) == "failed"
    made = [result(name, STEADY, round=1) for name in (EAGER, GRAPHS)]
    made.append(result(GRAPHS, round=2, status=LEFT_OUT, ranks=[]))
    assert verdict(graphs_of(made)).endswith("; a run left out")


def test_a_row_has_step_ratio_and_memory(result: Make) -> None:
    made = []
    for number, step in enumerate((50.0, 60.0), 1):
        made += [result(EAGER, STEADY, round=number), result(GRAPHS, (step,) * 8, round=number)]
    (rows,) = tables(made)
    eager, graphs = summary(rows).rows
    assert eager == [EAGER, "100.0", "-", "1,000", "the baseline"]
    assert graphs == [
        *(GRAPHS, "55.0", "0.550 (0.500 to 0.600)", "1,000 (1.000)"),
        "45.0% less time a step",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_it_is_plain_text_unless_for_a_terminal(result: Make, terminal: bool) -> None:
    out = io.StringIO()
    made = [result(EAGER, STEADY), result(GRAPHS, (50.0,) * 8, notice="CPU tape")]
    made[0]["notice"] = "CPU tape"
    print_summary(made, Console(file=out, force_terminal=terminal, width=120))
    text = out.getvalue()
    assert "llama: 8 layers, 2 microbatches, 2 processes" in text
    assert "50.0% less time a step, of one round" in text
    assert "CPU tape. Its times say nothing about a GPU." in text
    assert ("\x1b" in text or "│" in text) is terminal
    if not terminal:
        lines = text.splitlines()
        columns = {
            line.index(word)
            for line in lines
            for word in ("verdict", "the b", "50.0%")
            if word in line
        }
        assert len(columns) == 1


def test_a_configuration_is_compared_with_its_own_baseline(result: Make) -> None:
    steps = {EAGER: 200.0, TORCH_EAGER: 150.0, EXPERTS: 75.0, GRAPHS: 100.0}
    made = [result(name, (step,) * 8) for name, step in steps.items()]
    (rows,) = tables(made)
    columns, cells = summary(rows)
    assert columns[2:4] == ["/ baseline", "/ fsdp-eager"]
    found = {row[0]: row for row in cells}
    one = "time a step{}, of one round"
    assert found[EAGER][2:] == ["-", "-", "1,000", "the baseline"]
    assert found[GRAPHS][2:4] == ["0.500", "0.500"]
    assert found[GRAPHS][-1] == "50.0% less " + one.format("")
    assert found[TORCH_EAGER][2:] == ["-", "0.750", "1,000", "a baseline"]
    assert found[EXPERTS][2:4] == ["0.500", "0.375"]
    assert found[EXPERTS][-1] == "50.0% less " + one.format(f" than {TORCH_EAGER}")


def test_without_its_own_baseline_a_configuration_has_no_verdict(result: Make) -> None:
    (rows,) = tables([result(EAGER, STEADY), result(EXPERTS, STEADY)])
    assert verdict(rows[1]) == f"no {TORCH_EAGER} to compare with"
    eager, experts = summary(rows).rows
    assert eager[2:4] == ["-", "-"] and experts[2:4] == ["-", "1.000"]
    assert not rows[1].same_invocation
