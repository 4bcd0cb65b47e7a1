"""Which ranks train a model together: all that call ``graph_units``, and no others."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_cg.consensus.decision import AgreementError, Kind, Vote
from megatron_cg.consensus.exchange import Agreement
from megatron_cg.errors import ArgumentError
from megatron_cg.units import graph_units, graphs
from tests.unit.ranks import on_ranks

STEPS = 4


def units(**given: Any) -> Any:
    return graph_units(nn.Sequential(nn.Linear(4, 4)), "*", backend="tape", **given)


def call_on_one_rank() -> str:
    vars(graphs)["Agreement"] = partial(Agreement, timedelta(seconds=1))
    said = ""
    if dist.get_rank() == 2:
        try:
            units()
        except AgreementError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_that_comes_alone_learns_which_ranks_did_not() -> None:
    *others, said = on_ranks(call_on_one_rank, 3)
    assert said.startswith("ranks 0, 1 did not come here within 1 seconds of rank 2: ")
    assert "graph_units(..., group=GROUP)" in said and others == ["", ""]


def train_on_some_ranks() -> list[Any]:
    """In one process of three: the last two train, and are in other groups as well."""
    rank = dist.get_rank()
    trainers, _ = dist.new_group([1, 2]), dist.new_group([0, 2])
    if rank == 0:
        with pytest.raises(ArgumentError, match="with this rank in it"):
            units(group=trainers)
        dist.barrier()
        return []
    model = nn.Sequential(nn.Linear(4, 4))
    with graph_units(model, "*", backend="tape", warmup_steps=1, group=trainers) as made:
        for step in range(STEPS):
            with made.step():
                model(torch.ones(2 + (rank == 2 and step == 2), 4)).sum().backward()
        counts = made.counters
    votes = Agreement(group=trainers)
    asked = votes.agree(Kind.DELETION, Vote(against=rank == 2)).against
    with pytest.raises(AgreementError) as mixed:
        votes.agree(Kind.DELETION, Vote(), serial=rank)
    dist.barrier()
    return [counts.replayed, counts.eager, asked, str(mixed.value).partition(". ")[0]]


def test_ranks_that_do_not_train_are_not_waited_for() -> None:
    none, first, second = on_ranks(train_on_some_ranks, 3)
    words = "ranks came to different votes: deletion 1 on rank 1, deletion 2 on rank 2"
    assert none == []
    assert first == [3, 0, [2], words] and second == [2, 1, [2], words]


def test_a_group_is_one_of_this_rank(one_rank: None) -> None:
    for group in ("world", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ArgumentError, match="a process group of torch"):
            units(group=group)
    units(group=dist.group.WORLD).close()
