"""All ranks compile a region at the same call and for the same shape, or end with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_cg import compile_together
from megatron_cg.compiled import together
from megatron_cg.compiled.together import CompiledRegions
from megatron_cg.consensus.decision import AgreementError, Decision, Level
from megatron_cg.errors import PhaseError, UpstreamChangedError
from megatron_cg.upstream.patch import applied
from megatron_cg.upstream.symbols import Symbol
from tests.unit.compiled.together_runs import (
    MORE,
    RANKS,
    SLOW,
    USUAL,
    WIDTH,
    code_is_gone_after_a_pass,
    compiled_before_on_some,
    different_regions,
    one_does_not_come,
    one_does_not_come_and_none_compiles,
    one_guard_fails,
    play,
    sizes_of_other_names,
    static_sizes_agreed,
    static_sizes_differ,
)
from tests.unit.ranks import on_ranks


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


def test_static_sizes_grow_together(outcome: Any) -> None:
    """The ranks need 8, 9, 10, 11 and 8 at most."""
    for told in outcome(static_sizes_agreed):
        assert told == [static(8, 10, 12), [8, 10, 10, 12, 12, 3]]


def test_static_shapes_that_differ_are_refused_on_all_ranks(outcome: Any) -> None:
    for shapes, error in outcome(static_sizes_differ):
        assert shapes == static(USUAL)
        assert error.startswith("StaticShapeError: ranks would compile scale, line ")
        expected = f"L['batch'] is ({USUAL}, {WIDTH}) on ranks 0, 1, 3, ({MORE}, {WIDTH}) on rank 2"
        assert expected in error and "static_size()" in error


def test_a_rank_without_compiled_code_votes_too(outcome: Any) -> None:
    for rank, shapes in enumerate(outcome(compiled_before_on_some)):
        assert shapes == static(USUAL) * (1 if rank == SLOW else 2)


def test_a_rank_whose_code_is_gone_votes_after_another_region_passed(outcome: Any) -> None:
    for error, shapes in outcome(code_is_gone_after_a_pass):
        assert [error, shapes] == ["", static(USUAL) * 2]


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
            expected = "AgreementError: a rank is gone, or did not join a vote in time"
            assert len(errors) == 2 and all(error.startswith(expected) for error in errors)


def test_the_error_comes_at_the_end_where_dynamo_does_not_compile(outcome: Any) -> None:
    for rank, (error, after) in enumerate(outcome(one_does_not_come_and_none_compiles)):
        assert after == ([] if rank == SLOW else [""])
        assert error.startswith("" if rank == SLOW else "AgreementError: a rank is gone, or did")


def test_ranks_that_ask_for_different_sizes_end(outcome: Any) -> None:
    for rank, error in enumerate(outcome(sizes_of_other_names)):
        name = "images" if rank == SLOW else "tokens"
        assert error.startswith(f"AgreementError: this rank is at the size '{name}'")


def test_a_negative_size_is_refused() -> None:
    votes: Any = None  # would be used
    with pytest.raises(ValueError, match=r"static_size\(-1, multiple_of=1\)"):
        CompiledRegions(votes).static_size(-1)


def set_hook(hook: Any) -> Any:
    return torch._C._dynamo.eval_frame.set_guard_complete_hook(hook)


def refused(text: str) -> None:
    with pytest.raises(PhaseError, match=text), compile_together():
        pass


def test_torch_has_one_hook_and_a_later_one_stays(one_rank: None) -> None:
    before = applied()
    with compile_together():
        refused("another guard-complete hook is installed")
    torch.compiler.set_enable_guard_collectives(True)
    refused("another guard-complete hook is installed")
    assert torch.compiler.set_enable_guard_collectives(False)

    def hook(cache_hit: bool) -> bool:
        return cache_hit

    with compile_together():
        set_hook(hook)
    assert set_hook(None) is hook and applied() == before


def test_a_dynamo_that_suppresses_errors_is_refused(one_rank: None) -> None:
    before = applied()
    with torch._dynamo.config.patch(suppress_errors=True):
        refused(r"suppress_errors is on, .*suppress_errors = False .*TORCHDYNAMO_SUPPRESS_ERRORS")
    assert set_hook(None) is None and applied() == before


def test_process_groups_come_first() -> None:
    refused("init_process_group")


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Symbol("torch", together._EXCHANGE.path, "exchanges sizes", fingerprints=("0",))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(together, "_EXCHANGE", changed)
    with pytest.raises(UpstreamChangedError, match="has another body"), compile_together():
        pass


def test_no_vote_is_held_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    votes: Any = None  # would be used
    regions = CompiledRegions(votes)
    monkeypatch.setattr(together, "under_capture", lambda: True)
    assert regions.guards_checked(True) and not regions.guards_checked(False)
    assert regions.unraised is None


def test_a_failed_vote_before_a_capture_is_not_for_the_compilation_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failed:
        posted = 0

        def agree(self, *_vote: Any, serial: int) -> Decision:
            self.posted = serial
            return Decision(Level.RECAPTURE)

    votes: Any = Failed()
    regions = CompiledRegions(votes)
    assert not regions.guards_checked(False)
    with monkeypatch.context() as capture:
        capture.setattr(together, "under_capture", lambda: True)
        assert regions.guards_checked(True)
    regions.compilation_begins()
    assert votes.posted == 2


class FirstVoteFails:
    """Votes of which the first raises an error."""

    posted = 0

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def agree(self, *_vote: Any, serial: int) -> Decision:
        self.posted = serial
        if serial == 1:
            raise self._error
        return Decision()


def test_an_interrupt_in_the_hook_is_raised_where_the_region_is_compiled() -> None:
    """Once; the vote after it is held."""
    votes: Any = FirstVoteFails(KeyboardInterrupt())
    regions = CompiledRegions(votes)
    assert not regions.guards_checked(True)
    with pytest.raises(KeyboardInterrupt):
        regions.compilation_begins()
    assert votes.posted == 1
    assert regions.guards_checked(True) and votes.posted == 2


def test_an_error_that_no_compilation_raised_outlives_the_next_call() -> None:
    """Dynamo may not compile, so the end of the block has to raise it."""
    votes: Any = FirstVoteFails(AgreementError("another rank is at another vote"))
    regions = CompiledRegions(votes)
    assert not regions.guards_checked(True)
    assert not regions.guards_checked(True) and votes.posted == 1
    assert isinstance(regions.unraised, AgreementError)
