"""Graphs of compiled code that get their device and process groups when they are loaded.

Relied on: ``RegionalOutputCode`` serialises a graph by torch's GraphPickler, and calls
``post_compile`` when it is loaded (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._inductor.output_code import RegionalOutputCode
from torch.fx.node import map_aggregate

from megatron_cg.compiled.graph_checks import is_collective, rename
from megatron_cg.errors import ArtifactRefusedError
from megatron_cg.upstream.symbols import Symbol

RELIES_ON = (
    Symbol(
        "torch",
        "torch._inductor.output_code:RegionalOutputCode",
        "serialises a graph, and calls post_compile after loading",
        attributes=("post_compile", "prepare_for_serialization", "_graph_module"),
    ),
)


@dataclass(frozen=True)
class Rank:
    """What differs between the ranks that load the same code."""

    device: torch.device
    groups: Mapping[str, str]
    """The names of this rank's process groups, by ``mcg::`` and the role."""


_loading: ContextVar[Rank | None] = ContextVar("loading", default=None)


@contextmanager
def loading_for(rank: Rank) -> Iterator[None]:
    """Code that is loaded in the block runs on this rank."""
    token = _loading.set(rank)
    try:
        yield
    finally:
        _loading.reset(token)


class RankedOutputCode(RegionalOutputCode):
    """A graph on the meta device with roles for groups; on a rank once it is loaded."""

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Give the loaded graph this rank's device and groups."""
        if self._graph_module is not None:
            return  # In the process that traced it, where it is not run.
        super().post_compile(example_inputs, constants, graph_kwargs)
        rank = _loading.get()
        if rank is None:
            raise ArtifactRefusedError(
                "this code belongs to no rank yet: load it by megatron_cg.compiled.load.load"
            )
        give_to(rank, self._graph_module)


def give_to(rank: Rank, graph_module: Any) -> None:
    """Replace the meta device and the roles in a graph, in place."""

    def placed(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "meta":
            return rank.device
        return value

    for node in graph_module.graph.nodes:
        node.args = map_aggregate(node.args, placed)
        node.kwargs = map_aggregate(node.kwargs, placed)
        if is_collective(node):
            rename(node, rank.groups)
    graph_module.recompile()
