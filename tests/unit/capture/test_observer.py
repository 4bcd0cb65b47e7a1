"""What is noted in a capture: memory that is in other tensors, collectives, and events."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn

from megatron_cg.capture.observer import Observer
from megatron_cg.events import Event, PassBegan, PassEnded, PassesDone, emit, subscribe
from megatron_cg.replay.guard.addresses import Addresses, Watched
from megatron_cg.replay.unit import Unit


class Quantized:
    """A tensor whose memory is in others, as TE's are."""

    def __init__(self) -> None:
        self._data, self._transpose = torch.zeros(4), torch.zeros(4)
        self._scale_inv, self.device = None, torch.device("cpu")

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize("moved", ["_data", "_transpose"])
def test_all_memory_of_a_quantized_tensor_is_followed_and_told_in_hex(moved: str) -> None:
    weight = Quantized()
    where = Addresses([Watched(weight, "a weight", "It moved.")])  # type: ignore[arg-type]
    before = [weight._data, weight._transpose]
    where.note(forward=True)
    assert where.broken(forward=True) is None
    setattr(weight, moved, torch.zeros(4))
    found = where.broken(forward=True)
    words = "" if found is None else found.text("layer 0")
    assert f"was {hex(before[0].data_ptr())}, {hex(before[1].data_ptr())} at capture" in words
    assert hex(getattr(weight, moved).data_ptr()) in words


@pytest.mark.parametrize(
    ("in_forward", "in_backward", "known", "held"),
    [(0, 0, False, False), (1, 0, False, True), (0, 1, False, True), (0, 0, True, True)],
)
def test_collectives_of_a_capture_are_counted_in_each_of_its_passes(
    monkeypatch: pytest.MonkeyPatch, in_forward: int, in_backward: int, known: bool, held: bool
) -> None:
    # Of gathers before the capture, and after forward, before and after backward.
    counts = iter(accumulate((6, in_forward, 1, in_backward)))
    monkeypatch.setattr("megatron_cg.capture.observer.collectives_so_far", lambda: next(counts))
    layer = nn.Linear(1, 1)
    unit = Unit("layer 0", layer, (layer,), collectives=known)
    observer = Observer(unit, (torch.zeros(1),), {}, ())
    for forward in (True, False):
        observer.begun(forward=forward, warmup=False)
        observer.ended(forward=forward)
    assert observer.collectives is held


def test_subscribers_hear_every_event_in_order_until_they_are_undone() -> None:
    heard: list[tuple[str, Event]] = []
    undo_first = subscribe(lambda event: heard.append(("first", event)))
    undo_second = subscribe(lambda event: heard.append(("second", event)))
    emit(began := PassBegan("layer 7", forward=True))
    undo_first()
    undo_first()
    emit(ended := PassEnded("layer 7", forward=False))
    undo_second()
    emit(PassesDone())
    assert heard == [("first", began), ("second", began), ("second", ended)]
