"""No two operations of the fast path touch the same bytes without an order between them.

Real Megatron-FSDP trains in gloo processes. A trace records the bytes, streams and events of each
operation, and is checked afterwards. Nothing that runs depends on a wait (the host does all at once
and in order). So a test removes a wait from the trace, not from the program: the rest is the trace
of a program without it.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import megatron_cg
from megatron_cg.fully_shard import models
from tests.unit.ordering.runs import HAS_V2, RUNS, check_all
from tests.unit.ordering.trace import Site, ordering_places
from tests.unit.ranks import on_ranks

pytest.importorskip("megatron_fsdp")

RANKS = {name: ranks for ranks, runs in RUNS.items() for name in runs}
FAST_PATH = Path(megatron_cg.__file__).parent / "fastpath"
FILES = [*sorted(FAST_PATH.rglob("*.py")), *[Path(models.__file__)] * HAS_V2]
PLACES = {place: text for file in FILES for place, text in ordering_places(file)}
"""What orders anything on the fast path."""


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    check = partial(check_all, frozenset(PLACES))
    return [report for ranks in RUNS for report in on_ranks(check, ranks)]


def results(reports: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [report["results"][name] for report in reports if name in report["results"]]
    assert len(found) == RANKS[name]
    return found


@pytest.mark.parametrize("name", RANKS)
def test_everything_is_in_order(reports: list[dict[str, Any]], name: str) -> None:
    for result in results(reports, name):
        assert result["entries"] > 1000
        assert result["races"] == []


@pytest.mark.parametrize(("place", "text"), PLACES.items(), ids=str)
def test_each_wait_of_the_fast_path_is_missed(
    reports: list[dict[str, Any]], place: Site, text: str
) -> None:
    missed = [why for report in reports for *site, why in report["missed"] if (*site,) == place]
    assert missed, f"{text} at {place} is in no run, or no run needs it"
    assert "without waiting for" in missed[0]
