"""What each rank does with compiled regions in the scenarios of ``test_together.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_cg import compile_together

SHORT, LONG = timedelta(seconds=1), timedelta(minutes=10)
"""For a vote to which a rank does not come; for one to which all come, however slow the machine."""
RANKS, WIDTH, USUAL, MORE = 4, 3, 8, 12
SLOW = 2
"""The rank whose batch is larger, or that does not come."""


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


@contextmanager
def connected(**how: Any) -> Iterator[Any]:
    """``compile_together``, in which all ranks have connected to each other.

    A rank that votes nothing leaves at once and closes its connections, maybe before others have
    theirs.
    """
    with compile_together(**how) as together:
        dist.barrier()
        yield together


@contextmanager
def together_for_a_moment() -> Iterator[None]:
    """The block, whose votes wait for a short time; the ranks have a long one to connect."""
    connect = dist.new_group
    with (
        patch.object(dist, "new_group", lambda **how: connect(**how | {"timeout": LONG})),
        connected(timeout=SHORT),
    ):
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


def static_sizes_agreed(rank: int) -> Any:
    """Ranks 1 to 3 need more and more, each at the call of its number; at the last none does."""
    region, returned = Region(dynamic=False), []
    with compile_together(timeout=LONG) as together:
        for call in range(5):
            needed = USUAL + call if rank == call else USUAL - rank
            returned.append(together.static_size(needed, multiple_of=2))
            region(returned[-1])
        returned.append(together.static_size(3, "images"))
    return region.shapes, returned


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
    with compile_together(timeout=LONG):
        region(USUAL)
        region(USUAL)
    return region.shapes


def another_region() -> Callable[[torch.Tensor], torch.Tensor]:
    """With other code; :class:`Region` has the same code in all instances."""

    def other(batch: torch.Tensor) -> torch.Tensor:
        return batch + 1

    return torch.compile(other, backend="eager")


def code_is_gone_after_a_pass(rank: int) -> Any:
    """Another region passes in between, so the last vote before was on that one."""
    region, another = Region(), another_region()

    def block() -> None:
        with compile_together(timeout=LONG):
            region(USUAL)
            another(torch.ones(2))
            another(torch.ones(2))
            if rank == SLOW:
                region.lose_code()
            region(USUAL)

    return said(block), region.shapes


def different_regions(rank: int) -> Any:
    region, another = Region(), another_region()

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
        with together_for_a_moment():
            if rank != SLOW:
                first.append(said(lambda: region(USUAL)))
                region(USUAL)

    return first, said(block)


def one_does_not_come_and_none_compiles(rank: int) -> Any:
    """Dynamo may not compile, so the hook's error has no place to be raised but the end."""
    region = compiled_together()
    after: list[str] = []

    def block() -> None:
        with together_for_a_moment(), barrier_of_all():
            if rank != SLOW:
                with torch.compiler.set_stance("eager_on_recompile"):
                    after.append(said(lambda: region(USUAL)))

    return said(block), after


def sizes_of_other_names(rank: int) -> Any:
    def block() -> None:
        with compile_together(timeout=LONG) as together:
            together.static_size(USUAL, "images" if rank == SLOW else "tokens")

    return said(block)


SCENARIOS = (
    one_guard_fails,
    static_sizes_agreed,
    static_sizes_differ,
    compiled_before_on_some,
    code_is_gone_after_a_pass,
    different_regions,
    one_does_not_come,
    one_does_not_come_and_none_compiles,
    sizes_of_other_names,
)


def play() -> dict[str, Any]:
    """In one process: every scenario, and what came of it."""
    found = {}
    for scenario in SCENARIOS:
        torch.compiler.reset()
        dist.barrier()
        found[scenario.__name__] = scenario(dist.get_rank())
    return found
