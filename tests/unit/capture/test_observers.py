"""Subscribers hear events in order, until they are undone."""

from __future__ import annotations

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
