"""Subscribers hear events in order, until they are undone; what they raise is raised."""

from __future__ import annotations

import pytest

from megatron_cg.events import Event, PassBegan, PassEnded, PassesDone, emit, subscribe


def test_subscribers_hear_every_event_in_order_until_they_are_undone() -> None:
    heard: list[tuple[str, Event]] = []
    undo_first = subscribe(lambda event: heard.append(("first", event)))
    undo_second = subscribe(lambda event: heard.append(("second", event)))
    emit(PassBegan("layer 7", forward=True))
    undo_first()
    undo_first()
    emit(PassEnded("layer 7", forward=False))
    undo_second()
    emit(PassesDone())
    assert heard == [
        ("first", PassBegan("layer 7", forward=True)),
        ("second", PassBegan("layer 7", forward=True)),
        ("second", PassEnded("layer 7", forward=False)),
    ]


def test_what_a_subscriber_raises_reaches_the_core() -> None:
    def failing(_event: Event) -> None:
        raise OSError("no space")

    undo = subscribe(failing)
    try:
        with pytest.raises(OSError, match="no space"):
            emit(PassesDone())
    finally:
        undo()
