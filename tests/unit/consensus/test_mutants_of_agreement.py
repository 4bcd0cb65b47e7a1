"""What nothing looked at in the votes, found by ``python -m tools.mutate``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_cg.consensus.arrival import gloo_backend
from megatron_cg.consensus.decision import Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import PhaseError


def test_what_is_undone_together_waits_for_it_and_goes_in_reverse_and_once(one_rank: None) -> None:
    votes, undone = Agreement(), list[str]()
    assert votes.left is None
    votes.undo_together(lambda: undone.append("first"))
    assert votes.left == 1
    votes.undo_together(lambda: undone.append("second"))
    assert votes.left == 2 and undone == []
    votes.together()
    assert undone == ["second", "first"] and votes.left is None
    votes.together()
    assert undone == ["second", "first"]
    votes.undo_together(lambda: undone.append("third"))
    assert votes.left == 3


def test_no_vote_is_begun_in_a_capture(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    votes = Agreement()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for vote in (votes.agree, votes.post):
        with pytest.raises(PhaseError):
            vote(Kind.STEP, Vote())
    assert votes.time.votes == 0
    monkeypatch.undo()
    votes.post(Kind.STEP, Vote())
    assert votes.collect() is not None


def test_what_was_left_is_undone_as_votes_end(one_rank: None) -> None:
    votes, undone = Agreement(), list[str]()
    votes.undo_together(lambda: undone.append("left"))
    votes.close()
    assert undone == ["left"]


def test_a_capture_awaits_its_start_until_the_vote_on_it(one_rank: None) -> None:
    votes = Agreement()
    assert votes.awaits_start
    votes.ready()
    assert not votes.awaits_start
    votes.begin_capture()
    assert votes.awaits_start
    votes.close()


@pytest.mark.parametrize(
    "later",
    [
        lambda votes: votes.agree(Kind.STEP, Vote()),
        lambda votes: votes.post(Kind.STEP, Vote()),
        lambda votes: votes.gather(1),
    ],
)
def test_a_vote_with_a_timeout_leaves_later_votes_theirs(
    one_rank: None, later: Callable[[Agreement], Any]
) -> None:
    own, shorter = timedelta(minutes=7), timedelta(minutes=2)
    votes = Agreement(own)
    gloo: Any = gloo_backend(votes._require_sound())  # type: ignore[arg-type]
    votes.agree(Kind.MISMATCH, Vote(), timeout=shorter)
    assert gloo.options._timeout == shorter
    later(votes)
    assert gloo.options._timeout == own
