"""How many rows a graph has room for, and what happens when a rank receives more."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cg.experts.install import largest_slot
from megatron_cg.experts.row_bound import MULTIPLE, RowBound, clipped, enough

pytestmark = pytest.mark.usefixtures("one_rank", "late_copies")


class LateCopies(TorchDispatchMode):
    """Copies that do not block are made when the host waits for an event recorded behind them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.queued: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or args[2:] != (True,):
            return func(*args, **(kwargs or {}))
        self.queued.append(partial(args[0].copy_, args[1].clone()))
        return args[0]


@pytest.fixture
def late_copies(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Event:
        behind = 0

        def record(self) -> None:
            self.behind = len(copies.queued)

        def synchronize(self) -> None:
            while self.behind:
                copies.queued.pop(0)()
                self.behind -= 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    with LateCopies() as copies:
        yield


def most_of(bound: RowBound) -> int:
    excess = bound.exceeded()
    return 0 if excess is None else excess.rows


def placed(factor: float = 1.0) -> RowBound:
    bound = RowBound(factor)
    bound.place()
    bound.slot(2000, 2, 10**6)
    bound.begin_step()
    return bound


@pytest.mark.parametrize(
    ("factor", "sent", "worst", "rows"),
    [
        (1.0, 1024, 4096, 1024),
        (1.0, 1025, 4096, 1152),
        (1.25, 1024, 4096, 1280),
        (1.3, 1024, 4096, 1408),
        (4.0, 1024, 4096, 4096),
        (5.0, 1024, 4096, 4096),
        (float("inf"), 1024, 4096, 4096),
        (1.0, 64, 100, 100),
        (1.0, 0, 0, 0),
    ],
)
def test_room_is_a_multiple_of_the_average_and_of_128_up_to_the_worst_case(
    factor: float, sent: int, worst: int, rows: int
) -> None:
    bound = RowBound(factor)
    assert bound.slot(4 * sent, 4, worst) == bound.bound == rows
    assert rows == worst or rows % MULTIPLE == 0


@pytest.mark.parametrize(("topk", "local", "worst"), [(2, 2, 60), (8, 64, 240), (8, 2, 60)])
def test_in_the_worst_case_all_tokens_choose_one_ranks_experts(
    topk: int, local: int, worst: int
) -> None:
    assert largest_slot(30 * topk, topk, local) == worst


@pytest.mark.parametrize(("counts", "most"), [([1000, 0], 0), ([1024, 0], 0), ([3, 1025], 1025)])
def test_the_rank_that_is_sent_most_decides(counts: list[int], most: int) -> None:
    bound = placed()
    bound.watch(torch.tensor(counts))
    assert bound.holds() == (most == 0)
    assert most_of(bound) == most


def test_rows_beyond_a_slot_are_those_of_the_last_experts() -> None:
    counts = torch.tensor([[2, 3, 4], [5, 0, 0], [0, 0, 6], [1, 1, 1]])
    assert clipped(counts, 5).tolist() == [[2, 3, 0], [5, 0, 0], [0, 0, 5], [1, 1, 1]]
    assert clipped(counts, 9).tolist() == counts.tolist()


MANY = torch.tensor([2000, 3])


def test_the_largest_number_of_a_step_is_kept_and_the_next_step_forgets_it() -> None:
    bound = placed()
    for counts in ([1100, 1], [1, 3000], [2000, 1], [1, 1]):
        bound.watch(torch.tensor(counts))
    bound.place()  # The memory of graphs is made once.
    assert most_of(bound) == 3000 and not bound.holds()
    bound.begin_step()
    assert bound.holds() and bound.exceeded() is None


def test_what_was_shared_is_what_is_read() -> None:
    bound = placed()
    bound.share()
    bound.watch(MANY)
    assert bound.exceeded() is None
    bound.begin_step()
    with torch.device("meta"):  # Layers may be made there.
        (made_on_meta := placed()).watch(MANY)
        bound.watch(MANY)
        assert most_of(bound) == most_of(made_on_meta) == 2000


def test_enough_is_a_factor_that_has_room() -> None:
    assert [enough(rows, 1000) for rows in (1000, 1001, 1250, 1999)] == [1.0, 1.01, 1.25, 2.0]
