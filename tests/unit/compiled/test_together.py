"""All ranks compile a region at the same call and for the same shape, or end with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from megatron_cg import compile_together
from megatron_cg.compiled import together
from megatron_cg.compiled.together import _Votes
from megatron_cg.consensus.decision import Decision
from megatron_cg.errors import ArgumentError, PhaseError, UpstreamChangedError
from megatron_cg.upstream.patch import applied
from megatron_cg.upstream.symbols import Symbol
from tests.unit.ranks import on_ranks

SHORT, LONG = timedelta(seconds=1), timedelta(minutes=10)
"""For a vote to which a rank does not come; for one to which all come, however slow the machine."""
RANKS, WIDTH, USUAL, MORE = 4, 3, 8, 12
SLOW = 2
"""The rank whose batch is larger, or that does not come."""
MISSED = f"rank {SLOW} did not come to the vote on guard 1 with"


class Region:
    """A compiled region; ``shapes`` are those that it was compiled for, ``?`` if dynamic."""

    def __init__(self, **options: Any) -> None:
        self.shapes: list[str] = []

        def scale(batch: torch.Tensor) -> torch.Tensor:
            return batch * 2 + batch.size(0)

        self._code = scale.__code__
        self._compiled = torch.compile(scale, backend=self._backend, **options)

    def _backend(self, graph: Any, _inputs: Any) -> Any:
        traced = [
            node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")
        ]
        (batch,) = (one for one in traced if isinstance(one, torch.Tensor))
        sizes = ["?" if isinstance(s, torch.SymInt) else str(s) for s in batch.shape]
        self.shapes.append(" ".join(sizes))
        return graph

    def lose_code(self) -> None:
        """As when garbage collection takes an object that the guards hold."""
        torch._C._dynamo.eval_frame.reset_code(self._code)

    def __call__(self, size: int) -> None:
        batch = torch.ones(size, WIDTH)
        assert torch.equal(self._compiled(batch), batch * 2 + size)


@contextmanager
def told() -> Iterator[list[str]]:
    """The name and text of an error in the block; none if there was none."""
    errors: list[str] = []
    try:
        yield errors
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


@contextmanager
def together_for_a_moment() -> Iterator[None]:
    """The block, whose votes wait for a short time; the ranks have a long one to connect.

    A rank that votes nothing would leave at once, maybe before others have connected to it.
    """
    connect = dist.new_group
    with (
        patch.object(
            dist, "new_group", lambda ranks, _, *how, **more: connect(ranks, LONG, *how, **more)
        ),
        compile_together(timeout=SHORT),
    ):
        dist.barrier()
        yield


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
    with compile_together(timeout=LONG):
        region(USUAL)
        region(USUAL)
        region(batch_of(rank))
        region(USUAL)
        region(batch_of(rank))
    return region.shapes


def static_sizes_differ(rank: int) -> Any:
    region = Region(dynamic=False)
    with told() as errors, compile_together(timeout=LONG):
        region(USUAL)
        region(batch_of(rank))
    return region.shapes, errors


def another_region() -> Callable[[torch.Tensor], torch.Tensor]:
    """With other code; :class:`Region` has the same code in all instances."""

    def other(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    return torch.compile(other, backend="eager")


def code_is_gone_after_a_pass(rank: int) -> Any:
    """Another region passes in between, so the last vote before was on that one."""
    region, another = Region(), another_region()
    with compile_together(timeout=LONG):
        region(USUAL)
        another(torch.ones(2))
        another(torch.ones(2))
        if rank == SLOW:
            region.lose_code()
        region(USUAL)
    return region.shapes


def different_regions(rank: int) -> Any:
    region, another = Region(), another_region()
    with told() as errors, compile_together(timeout=LONG):
        if rank == SLOW:
            another(torch.ones(2))
        else:
            region(USUAL)
    return errors


def one_does_not_come(rank: int) -> Any:
    """The others' error can be caught where the region is called, and comes again at each call."""
    region, first = compiled_together(), list[str]()
    with told() as again, together_for_a_moment():
        if rank != SLOW:
            with told() as first:
                region(USUAL)
            region(USUAL)
    return first, again


def one_does_not_come_and_none_compiles(rank: int) -> Any:
    """Dynamo may not compile, so the hook's error has no place to be raised but the end."""
    region = compiled_together()
    with told() as errors, together_for_a_moment():
        with told() as before, torch.compiler.set_stance("eager_on_recompile"):
            if rank != SLOW:
                region(USUAL)
        dist.barrier()
    return before, errors


SCENARIOS = (
    *(one_guard_fails, static_sizes_differ, code_is_gone_after_a_pass),
    *(different_regions, one_does_not_come, one_does_not_come_and_none_compiles),
)


def play() -> dict[str, Any]:
    """In one process: every scenario, and what came of it."""
    found = {}
    for scenario in SCENARIOS:
        torch.compiler.reset()
        dist.barrier()
        found[scenario.__name__] = scenario(dist.get_rank())
    return found


@pytest.fixture(scope="module")
def outcome() -> Callable[[Any], list[Any]]:
    """What a scenario came to on each rank."""
    ranks = on_ranks(play, RANKS)
    return lambda scenario: [found[scenario.__name__] for found in ranks]


def static(*sizes: int) -> list[str]:
    return [f"{size} {WIDTH}" for size in sizes]


def test_all_compile_for_one_shape_when_one_guard_fails(outcome: Any) -> None:
    for shapes in outcome(one_guard_fails):
        assert shapes == [*static(USUAL), f"? {WIDTH}"]


def test_static_shapes_that_differ_are_refused_on_all_ranks(outcome: Any) -> None:
    for shapes, (error,) in outcome(static_sizes_differ):
        assert shapes == static(USUAL)
        assert error.startswith("AgreementError: ranks would compile scale, line ")
        expected = f"L['batch'] is ({USUAL}, {WIDTH}) on ranks 0, 1, 3, ({MORE}, {WIDTH}) on rank 2"
        assert expected in error and "the largest size of all ranks" in error


def test_a_rank_whose_code_is_gone_votes_after_another_region_passed(outcome: Any) -> None:
    for shapes in outcome(code_is_gone_after_a_pass):
        assert shapes == static(USUAL) * 2


def test_ranks_in_different_regions_end(outcome: Any) -> None:
    for rank, (error,) in enumerate(outcome(different_regions)):
        name = "other" if rank == SLOW else "scale"
        assert error.startswith(f"AgreementError: this rank is at {name}, line ")
        assert f"rank {SLOW} differ" in error


def test_a_rank_that_does_not_come_ends_the_others_by_the_timeout(outcome: Any) -> None:
    for rank, (first, again) in enumerate(outcome(one_does_not_come)):
        assert len(first) == len(again) == (rank != SLOW)
        assert all(MISSED in error and "is not compiled" in error for error in (*first, *again))


def test_the_error_comes_at_the_end_where_dynamo_does_not_compile(outcome: Any) -> None:
    for rank, (before, errors) in enumerate(outcome(one_does_not_come_and_none_compiles)):
        assert before == [] and len(errors) == (rank != SLOW)
        assert all(MISSED in error for error in errors)


def refused(text: str) -> None:
    with pytest.raises(PhaseError, match=text), compile_together():
        pass


def test_nothing_else_may_hold_the_hook_or_suppress_errors(one_rank: None) -> None:
    before = applied()
    with compile_together():
        refused("another guard-complete hook is installed")
    torch.compiler.set_enable_guard_collectives(True)
    refused("another guard-complete hook is installed")
    assert torch.compiler.set_enable_guard_collectives(False)
    with torch._dynamo.config.patch(suppress_errors=True):
        refused(r"suppress_errors is on, .*suppress_errors = False .*TORCHDYNAMO_SUPPRESS_ERRORS")
    hook = torch._C._dynamo.eval_frame.set_guard_complete_hook(None)
    assert hook is None and applied() == before


def test_a_number_of_seconds_is_refused_first() -> None:
    with pytest.raises(ArgumentError, match=r"timeout=20: it is a datetime\.timedelta"):
        compile_together(timeout=20).__enter__()  # type: ignore[arg-type]


def test_process_groups_come_first() -> None:
    refused("init_process_group")


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Symbol(together._EXCHANGE.path, "exchanges sizes", fingerprints=("0",))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(together, "_EXCHANGE", changed)
    with pytest.raises(UpstreamChangedError, match="has another body"), compile_together():
        pass


def first_vote(outcome: Decision | BaseException) -> Any:
    """Votes of which the first has this outcome, and which all pass from then on."""
    return Mock(agree=Mock(side_effect=chain([outcome], repeat(Decision()))))


def serials(votes: Any) -> list[int]:
    return [call.kwargs["serial"] for call in votes.agree.call_args_list]


def test_no_vote_is_held_in_a_capture_and_one_before_it_is_not_for_a_compilation_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    votes = first_vote(Decision(against=(0,)))
    regions = _Votes(votes)
    assert not regions.guards_checked(False)
    with monkeypatch.context() as capture:
        capture.setattr(together, "under_capture", lambda: True)
        assert regions.guards_checked(True) and not regions.guards_checked(False)
    assert serials(votes) == [1] and regions.unraised is None
    regions.compilation_begins()
    assert serials(votes) == [1, 2]


def test_an_interrupt_in_the_hook_is_raised_where_the_region_is_compiled() -> None:
    """Once; the vote after it is held."""
    votes = first_vote(KeyboardInterrupt())
    regions = _Votes(votes)
    assert not regions.guards_checked(True)
    with pytest.raises(KeyboardInterrupt):
        regions.compilation_begins()
    assert serials(votes) == [1]
    assert regions.guards_checked(True) and serials(votes) == [1, 2]
