"""What the page says of two runs' settings: in which they differ, and in which they do not."""

from __future__ import annotations

from typing import Any

from megatron_cg.tools.report.facts import facts
from megatron_cg.tools.report.story import Story
from tests.unit.tools.report.made_up import make_record

PARTS = "scopes in graphs"


def parts(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    (row,) = [
        row for row in facts(Story("x", {0: run}, reference={0: reference})) if row[0] == PARTS
    ]
    return row[1:]


def test_other_scopes_alone_are_a_difference() -> None:
    run, other = make_record(), make_record()
    for layer in other["captures"][-1]["coverage"]:
        layer["graphed"] = ["attn"]
    other["command"] = run["command"]
    assert parts(run, other) == ["attn of 24 layers", "attn of 20 layers, moe_router of 22 layers"]
    rows = facts(Story("x", {0: run}, reference={0: other}))
    assert [name for name, *values in rows if len(set(values)) > 1] == [PARTS]


def test_no_graph_and_no_record_of_graphs_are_not_the_same() -> None:
    old = make_record(graphs=False)
    del old["captures"]
    assert parts(make_record(graphs=False), old) == ["not recorded", "none"]
