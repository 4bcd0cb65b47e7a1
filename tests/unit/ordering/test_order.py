"""No two operations of the fast path touch the same bytes without an order between them.

Real Megatron-FSDP trains in two gloo processes. A trace records
the bytes, streams and events of each operation, and is checked afterwards. Nothing that runs
depends on a wait (the host does all at once and in order). So a test removes a wait from the trace,
not from the program: the rest is the trace of a program without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import megatron_cg
from megatron_cg.tools.cpu.launch import run_processes
from tests.unit.ordering import excused
from tests.unit.ordering.checked import FSDP, check_all
from tests.unit.ordering.configurations import POOLED, SEVERAL_STREAMS, configurations
from tests.unit.ordering.sites import ordering_places
from tests.unit.ordering.trace import Site

pytest.importorskip("megatron_fsdp")

OWN = Path(megatron_cg.__file__).parent
RANKS = {name: ranks for ranks, found in configurations().items() for name in found}
IN_ORDER = [name for name in RANKS if name not in {*POOLED, *SEVERAL_STREAMS}]
COPY = "param.main_grad.copy_(to_local_if_dtensor(param.grad))"
"""In Megatron-FSDP's ``_grad_acc``."""


def places(files: Iterable[Path]) -> dict[Site, str]:
    """What orders anything in these sources."""
    return {site: text for file in sorted(files) for site, text in ordering_places(file)}


OWN_PLACES, FSDP_PLACES = places(OWN.rglob("*.py")), places(FSDP.glob("*.py"))
PLACES = frozenset(OWN_PLACES.keys() | FSDP_PLACES.keys())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("order")
    for ranks in set(RANKS.values()):
        run_processes(partial(check_all, folder, PLACES), ranks)
    files = [folder / f"{rank} of {n}.json" for n in set(RANKS.values()) for rank in range(n)]
    return [json.loads(file.read_text()) for file in files]


def results(reports: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What every rank found in a configuration."""
    found = [report["found"][name] for report in reports if name in report["found"]]
    assert len(found) == RANKS[name]
    return found


@pytest.mark.parametrize("name", IN_ORDER)
def test_everything_is_in_order(reports: list[dict[str, Any]], name: str) -> None:
    for found in results(reports, name):
        assert found["entries"] > 1000
        assert found["races"] == []


@pytest.mark.parametrize("name", POOLED)
def test_megatron_fsdp_overwrites_gradients_that_are_being_sent(
    reports: list[dict[str, Any]], name: str
) -> None:
    """Known: what Note [A buffer that is still read] in ``buffers.py`` is about, and nothing else.

    If this fails because nothing is found, upstream is fixed, and the fast path's wait may go.
    """
    for found in results(reports, name):
        assert found["kinds"]
        for one in found["kinds"]:
            second, first, memory = one.split(" | ")
            assert second == COPY and memory.startswith("Megatron-FSDP's buffer fsdp_grads_")
            assert first in ("with _coalescing_manager(dp_group):", "local_grad += reduced_grad")


@pytest.mark.parametrize("name", SEVERAL_STREAMS)
def test_megatron_fsdp_knows_one_stream_of_gradients(
    reports: list[dict[str, Any]], name: str
) -> None:
    """Known: its reductions wait for the stream of the last gradient, and not for the others'."""
    for found in results(reports, name):
        kinds = [one.split(" | ")[:2] for one in found["kinds"]]
        assert [COPY, "with _coalescing_manager(dp_group):"] in [sorted(pair) for pair in kinds]
        assert all(COPY in pair for pair in kinds)


def missed(reports: list[dict[str, Any]], place: Site) -> str | None:
    """What was found without the wait at ``place``, in any configuration."""
    waits = (wait for report in reports for wait in report["waits"] if wait[:3] == [*place])
    return next((text for _, _, _, *texts in waits for text in texts), None)


@pytest.mark.parametrize(("place", "text"), OWN_PLACES.items(), ids=str)
def test_each_wait_of_this_package_is_missed(
    reports: list[dict[str, Any]], place: Site, text: str
) -> None:
    is_excused = (place.file, text) in excused.OWN
    found = missed(reports, place)
    assert is_excused or found, f"{text} at {place} is in no run, or no run needs it"
    assert not (is_excused and found), f"{text} at {place} is needed, and excused"
    assert not found or "without waiting for" in found


@pytest.mark.parametrize(("place", "text"), FSDP_PLACES.items(), ids=str)
def test_each_wait_of_megatron_fsdp_is_missed(
    reports: list[dict[str, Any]], place: Site, text: str
) -> None:
    is_excused = (place.file, text) in excused.UPSTREAM
    found = missed(reports, place)
    assert is_excused or found or (place.file, text) in excused.UPSTREAM_PARTLY
    assert not (is_excused and found)


def test_no_wait_is_met_that_is_not_in_the_sources(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["unknown"] == []


def test_every_excuse_is_somebodys() -> None:
    """Every excused place exists, and no place on the fast path is excused."""
    own = {(place.file, text) for place, text in OWN_PLACES.items()}
    theirs = {(place.file, text) for place, text in FSDP_PLACES.items()}
    assert set(excused.OWN) <= own and not any("/fastpath/" in file for file, _ in excused.OWN)
    assert set(excused.UPSTREAM) | set(excused.UPSTREAM_PARTLY) <= theirs
