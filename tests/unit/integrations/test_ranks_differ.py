"""Ranks that were started with other settings, packages or variables learn it when they meet."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from megatron_cg import compile_together, graph_units
from megatron_cg.arguments import schema
from megatron_cg.arguments.schema import GraphArguments
from megatron_cg.consensus.decision import AgreementError
from megatron_cg.integrations.call_arguments import ENABLE
from megatron_cg.tape.tape_backend import TapeBackend
from megatron_cg.upstream import symbols
from megatron_cg.upstream.patch import applied
from tests.unit.ranks import on_ranks

RANKS = 3


def units(units: Any = nn.Linear, **given: Any) -> None:
    graph_units(
        nn.Sequential(nn.Linear(4, 4)), units, **{"backend": TapeBackend(), **given}
    ).close()


def script(call: str = "", seq_length: int = 8, **given: Any) -> None:
    """What Megatron's helper of a script meets with, or of a loop that has called ``call``."""
    from megatron_cg.integrations.megatron.helper import meet

    sizes = {"config": None, "seq_length": seq_length}
    meet(call, "tape", GraphArguments(**given), sizes).close()


def compiled(seconds: int = 600) -> None:
    with compile_together(timeout=timedelta(seconds=seconds)):
        pass


def with_version(name: str, version: str) -> None:
    other = {name: version}
    with patch.object(
        schema, "installed_version", lambda n: other.get(n) or symbols.installed_version(n)
    ):
        units()


def with_variable(name: str, value: str) -> None:
    with patch.dict(os.environ, {name: value}):
        compiled()


def calls(last: bool) -> Iterator[tuple[Callable[[], None], str]]:
    """What is called on the ranks, of which the ``last`` differs, and what is said of it."""
    yield lambda: units(nn.Linear if last else "0"), "units is ['0'] on ranks 0, 1, ['Linear'] on"
    yield lambda: units(warmup_steps=1 + last), "warmup_steps is 1 on ranks 0, 1, 2 on rank 2"
    yield lambda: units(fast_path=last), "fast_path is False on ranks 0, 1, True on rank 2"
    yield lambda: script(ENABLE, cg_verify_interval=int(last)), "interval is 0 on ranks 0, 1, 1"
    yield lambda: script(ENABLE, 8 << last), "seq_length is 8 on ranks 0, 1, 16 on rank 2"
    yield lambda: script(cg_layers=("attn:0",) * last), "--cg-layers is () on ranks 0, 1, ('attn:"
    yield lambda: compiled(60 << last), "timeout is 0:01:00 on ranks 0, 1, 0:02:00 on rank 2"
    yield compiled if last else units, "call is graph_units on ranks 0, 1, compile_together on"
    yield lambda: with_variable("NCCL_GRAPH_REGISTER", str(int(last))), "R is 0 on ranks 0, 1, 1 on"
    version = "2.20" if last else "2.19"
    of = "version of transformer-engine is 2.19 on ranks 0, 1, 2.20 on rank 2"
    yield lambda: with_version("transformer-engine", version), of
    # These differ rightly.
    yield lambda: script(cg_record=f"folder/{last}"), ""
    yield lambda: with_variable("CUDA_VISIBLE_DEVICES", str(int(last))), ""


def call_on_all() -> list[str]:
    before, said = applied(), []
    for call, _ in calls(dist.get_rank() == RANKS - 1):
        try:
            call()
            said.append("")
        except AgreementError as error:
            said.append(str(error))
    assert applied() == before
    return said


def test_the_difference_is_named_on_all_ranks_before_anything_is_changed() -> None:
    for rank in on_ranks(call_on_all, RANKS):
        for said, (_, expected) in zip(rank, calls(False), strict=True):
            assert expected in said and bool(expected) == said.startswith("ranks differ: "), said
