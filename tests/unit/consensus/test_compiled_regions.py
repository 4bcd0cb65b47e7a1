"""All ranks compile a region at the same call and for the same shape, or end with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg import compile_together
from megatron_cg.consensus import compiled_regions
from megatron_cg.consensus.compiled_regions import CompiledRegions
from megatron_cg.consensus.decision import Decision
from megatron_cg.errors import PhaseError, UpstreamChangedError
from megatron_cg.tools.cpu.launch import run_processes
from megatron_cg.upstream import patch
from megatron_cg.upstream.symbols import Symbol

SHORT, LONG = timedelta(seconds=1), timedelta(minutes=10)
"""For a vote to which a rank does not come; for one to which all come, however slow the machine."""
RANKS, WIDTH, USUAL, MORE = 4, 3, 8, 12
SLOW = 2
"""The rank whose batch is larger, or that does not come."""


class Region:
    """A compiled region; ``shapes`` are those that it was compiled for, ``?`` if dynamic."""

    def __init__(self, at_compilation: Callable[[], Any] = lambda: None, **options: Any) -> None:
        self.shapes: list[str] = []
        self._at_compilation = at_compilation

        def scale(batch: torch.Tensor) -> torch.Tensor:
            return batch * 2 + batch.size(0)

        self._compiled = torch.compile(scale, backend=self._backend, **options)

    def _backend(self, graph: Any, _inputs: Any) -> Any:
        self._at_compilation()
        traced = [
            node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")
        ]
        (batch,) = (one for one in traced if isinstance(one, torch.Tensor))
        sizes = ["?" if isinstance(s, torch.SymInt) else str(s) for s in batch.shape]
        self.shapes.append(" ".join(sizes))
        return graph

    def __call__(self, size: int) -> None:
        batch = torch.ones(size, WIDTH)
        assert torch.equal(self._compiled(batch), batch * 2 + size)


def said(call: Callable[[], Any]) -> str:
    """The error's name and text; empty if there was none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def barrier_of_all() -> Iterator[None]:
    """The block, then wait for all ranks."""
    try:
        yield
    finally:
        dist.barrier()


def compiled_together() -> Region:
    """A region that all ranks have compiled."""
    region = Region()
    with compile_together(timeout=LONG):
        region(USUAL)
    dist.barrier()
    return region


def batch_of(rank: int) -> int:
    return MORE if rank == SLOW else USUAL


def one_guard_fails(rank: int) -> Any:
    region = Region()
    with compile_together(timeout=LONG) as together:
        region(USUAL)
        region(USUAL)
        region(batch_of(rank))
        region(USUAL)
        region(batch_of(rank))
    return region.shapes, together.counters.as_dict(), together.time.as_dict()


def one_guard_fails_alone(rank: int) -> Any:
    region = Region()
    region(USUAL)
    region(batch_of(rank))
    return region.shapes


def compilers_meet_alone(rank: int) -> Any:
    """A compiler that makes decisions with the other ranks, as torch's partitioner does."""
    group = dist.new_group(backend="gloo", timeout=SHORT)
    region = Region(partial(dist.all_reduce, torch.ones(1), group=group))
    region(USUAL)
    waited = said(lambda: region(batch_of(rank)))
    dist.barrier()
    return region.shapes, waited


def compilers_meet(rank: int) -> Any:
    group = dist.new_group(backend="gloo", timeout=LONG)
    region = Region(partial(dist.all_reduce, torch.ones(1), group=group))
    with compile_together(timeout=LONG):
        region(USUAL)
        waited = said(lambda: region(batch_of(rank)))
    return region.shapes, waited


def static_sizes_agreed(rank: int) -> Any:
    """Ranks 1 to 3 need more and more, each at the call of its number; at the last none does."""
    region, returned = Region(dynamic=False), []
    with compile_together(timeout=LONG) as together:
        for call in range(5):
            needed = USUAL + call if rank == call else USUAL - rank
            returned.append(together.static_size(needed, multiple_of=2))
            region(returned[-1])
        returned.append(together.static_size(3, "images"))
    return region.shapes, returned, together.counters.sizes


def static_sizes_differ(rank: int) -> Any:
    region = Region(dynamic=False)

    def block() -> None:
        with compile_together(timeout=LONG):
            region(USUAL)
            region(batch_of(rank))

    return region.shapes, said(block)


def compiled_before_on_some(rank: int) -> Any:
    """As if one rank's code were gone."""
    region = Region()
    if rank != SLOW:
        region(USUAL)
    with compile_together(timeout=LONG) as together:
        region(USUAL)
        region(USUAL)
    return region.shapes, together.counters.as_dict()


def different_regions(rank: int) -> Any:
    def other(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    region, another = Region(), torch.compile(other, backend="eager")

    def block() -> None:
        with compile_together(timeout=LONG):
            if rank == SLOW:
                another(torch.ones(2))
            else:
                region(USUAL)

    return said(block)


def one_does_not_come(rank: int) -> Any:
    """The others' error can be caught where the region is called, and comes again at each call."""
    region = compiled_together()
    first: list[str] = []

    def block() -> None:
        with compile_together(timeout=SHORT):
            if rank != SLOW:
                first.append(said(lambda: region(USUAL)))
                region(USUAL)

    return first, said(block)


def one_does_not_come_and_none_compiles(rank: int) -> Any:
    """Dynamo may not compile, so the hook's error has no place to be raised but the end."""
    region = compiled_together()
    after: list[str] = []

    def block() -> None:
        with compile_together(timeout=SHORT), barrier_of_all():
            if rank != SLOW:
                with torch.compiler.set_stance("eager_on_recompile"):
                    after.append(said(lambda: region(USUAL)))

    return said(block), after


def one_does_not_compile(rank: int) -> Any:
    """One rank votes that its guards fail, and ends."""

    def block() -> None:
        with compile_together(timeout=SHORT) as together, barrier_of_all():
            region = Region()
            if rank == SLOW:
                together.guards_checked(False)
            else:
                region(USUAL)

    return said(block)


def sizes_of_other_names(rank: int) -> Any:
    def block() -> None:
        with compile_together(timeout=LONG) as together:
            together.static_size(USUAL, "images" if rank == SLOW else "tokens")

    return said(block)


def without_dynamo(rank: int) -> Any:
    with compile_together(timeout=LONG) as together:
        torch.ones(USUAL).sum()
        wrong = said(lambda: together.static_size(-1))
    return together.counters.as_dict(), wrong


def in_each_other(rank: int) -> Any:
    """A second block; torch's own hook; and all as before in the end."""
    set_hook = torch._C._dynamo.eval_frame.set_guard_complete_hook

    def enter() -> None:
        with compile_together(timeout=LONG):
            pass

    changes = len(patch.applied())
    with compile_together(timeout=LONG):
        second = said(enter)
    torch.compiler.set_enable_guard_collectives(True)
    over_torchs = said(enter)
    kept = torch.compiler.set_enable_guard_collectives(False)

    def hook(cache_hit: bool) -> bool:
        return cache_hit

    with compile_together(timeout=LONG):
        set_hook(hook)
    later = set_hook(None) is hook
    return second, over_torchs, kept, later, len(patch.applied()) - changes


SCENARIOS = (
    one_guard_fails,
    one_guard_fails_alone,
    compilers_meet_alone,
    compilers_meet,
    static_sizes_agreed,
    static_sizes_differ,
    compiled_before_on_some,
    different_regions,
    one_does_not_come,
    one_does_not_come_and_none_compiles,
    one_does_not_compile,
    sizes_of_other_names,
    without_dynamo,
    in_each_other,
)


def play(root: Path) -> None:
    """In one process: every scenario, and what came of it into files."""
    rank = dist.get_rank()
    for scenario in SCENARIOS:
        torch.compiler.reset()
        dist.barrier()
        (root / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(scenario(rank)))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[Any]]:
    """What a scenario came to on each rank."""
    root = tmp_path_factory.mktemp("regions")
    run_processes(partial(play, root), RANKS)

    def read(scenario: Any) -> list[Any]:
        return [
            json.loads((root / f"{scenario.__name__}.{rank}.json").read_text())
            for rank in range(RANKS)
        ]

    return read


def static(*sizes: int) -> list[str]:
    return [f"{size} {WIDTH}" for size in sizes]


def test_all_compile_for_one_shape_when_one_guard_fails(outcome: Any) -> None:
    for rank, (shapes, counters, spent) in enumerate(outcome(one_guard_fails)):
        assert shapes == [*static(USUAL), f"? {WIDTH}"]
        failed = 1 + (rank == SLOW)
        assert counters == {
            "guards": 5,
            "failed": failed,
            "followed": 2 - failed,
            "compiled": 2,
            "sizes": 0,
        }
        assert spent["votes"] == 7 and min(spent["issuing_ms"], spent["waiting_ms"]) > 0


def test_without_the_agreement_one_rank_compiles_alone(outcome: Any) -> None:
    for rank, shapes in enumerate(outcome(one_guard_fails_alone)):
        assert shapes == static(USUAL) + [f"? {WIDTH}"] * (rank == SLOW)


def test_without_the_agreement_compilers_that_meet_wait_for_ever(outcome: Any) -> None:
    for rank, (shapes, waited) in enumerate(outcome(compilers_meet_alone)):
        assert shapes == static(USUAL)
        assert ("Timed out waiting" in waited) is (rank == SLOW)


def test_compilers_that_meet_compile_for_one_shape(outcome: Any) -> None:
    for told in outcome(compilers_meet):
        assert told == [[*static(USUAL), f"? {WIDTH}"], ""]


def test_static_sizes_grow_together(outcome: Any) -> None:
    """The ranks need 8, 9, 10, 11 and 8 at most."""
    for told in outcome(static_sizes_agreed):
        assert told == [static(8, 10, 12), [8, 10, 10, 12, 12, 3], 6]


def test_static_shapes_that_differ_are_refused_on_all_ranks(outcome: Any) -> None:
    for shapes, error in outcome(static_sizes_differ):
        assert shapes == static(USUAL)
        assert error.startswith("StaticShapeError: ranks would compile scale, line ")
        expected = f"L['batch'] is ({USUAL}, {WIDTH}) on ranks 0, 1, 3, ({MORE}, {WIDTH}) on rank 2"
        assert expected in error and "static_size()" in error


def test_a_rank_without_compiled_code_votes_too(outcome: Any) -> None:
    for rank, (shapes, counters) in enumerate(outcome(compiled_before_on_some)):
        assert shapes == static(USUAL) * (1 if rank == SLOW else 2)
        assert [counters["guards"], counters["failed"]] == [2, int(rank == SLOW)]


def test_ranks_in_different_regions_end(outcome: Any) -> None:
    for rank, error in enumerate(outcome(different_regions)):
        name = "other" if rank == SLOW else "scale"
        assert error.startswith(f"AgreementError: this rank is at {name}, line ")
        assert f"rank {SLOW} differ" in error


def test_a_rank_that_does_not_come_ends_the_others_by_the_timeout(outcome: Any) -> None:
    for rank, (first, again) in enumerate(outcome(one_does_not_come)):
        errors = [*first, again]
        if rank == SLOW:
            assert errors == [""]
        else:
            expected = "AgreementError: a rank is gone, or did not come to a vote"
            assert len(errors) == 2 and all(error.startswith(expected) for error in errors)


def test_the_error_comes_at_the_end_where_dynamo_does_not_compile(outcome: Any) -> None:
    for rank, (error, after) in enumerate(outcome(one_does_not_come_and_none_compiles)):
        assert after == ([] if rank == SLOW else [""])
        assert error.startswith("" if rank == SLOW else "AgreementError: a rank is gone, or did")


def test_a_rank_that_does_not_come_to_compile_ends_the_others(outcome: Any) -> None:
    for rank, error in enumerate(outcome(one_does_not_compile)):
        if rank != SLOW:
            assert error.startswith("AgreementError: a rank is gone, or did not come to a vote")


def test_ranks_that_ask_for_different_sizes_end(outcome: Any) -> None:
    for rank, error in enumerate(outcome(sizes_of_other_names)):
        name = "images" if rank == SLOW else "tokens"
        assert error.startswith(f"AgreementError: this rank is at the size '{name}'")


def test_a_block_without_compiled_regions_costs_no_vote(outcome: Any) -> None:
    for counters, wrong in outcome(without_dynamo):
        assert set(counters.values()) == {0}
        assert wrong.startswith("ValueError: static_size(-1, multiple_of=1)")


def test_torch_has_one_hook(outcome: Any) -> None:
    refused = "PhaseError: another guard-complete hook is installed"
    for second, over_torchs, kept, later, changes in outcome(in_each_other):
        assert second.startswith(refused) and over_torchs.startswith(refused)
        assert [kept, later, changes] == [True, True, 0]


def test_process_groups_come_first() -> None:
    with pytest.raises(PhaseError, match="init_process_group"), compile_together():
        pass


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Symbol(
        "torch", compiled_regions._EXCHANGE.path, "exchanges sizes", fingerprints=("0",)
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(compiled_regions, "_EXCHANGE", changed)
    with pytest.raises(UpstreamChangedError, match="has another body"), compile_together():
        pass


def test_no_vote_is_held_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    votes: Any = None  # would be used
    regions = CompiledRegions(votes)
    monkeypatch.setattr(compiled_regions, "under_capture", lambda: True)
    assert regions.guards_checked(True) and not regions.guards_checked(False)
    assert regions.unraised is None


def test_an_interrupt_in_the_hook_is_raised_where_the_region_is_compiled() -> None:
    """Once; the vote after it is held."""

    class Interrupted:
        posted = 0

        def post(self, *_vote: Any, serial: int) -> None:
            self.posted = serial
            if serial == 1:
                raise KeyboardInterrupt

        def collect(self) -> Decision:
            return Decision()

    votes: Any = Interrupted()
    regions = CompiledRegions(votes)
    assert not regions.guards_checked(True)
    with pytest.raises(KeyboardInterrupt):
        regions.compilation_begins()
    assert votes.posted == 1
    assert regions.guards_checked(True) and votes.posted == 2
