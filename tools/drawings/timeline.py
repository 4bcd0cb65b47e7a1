"""Lanes over time: what the host, the streams and the hooks do, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.drawings.svg import Drawing

WIDTH = 980.0
_LABELS = 150.0
_LANE = 50.0
_BOX = 38.0
_HEAD = 58.0
_FOOT = 14.0


@dataclass(frozen=True)
class Span:
    """Something on a lane from ``start`` to ``end``, in hundredths of the drawing."""

    lane: str
    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True)
class Wait:
    """What starts at ``end`` on one lane because of something on another at ``start``."""

    from_lane: str
    start: float
    to_lane: str


@dataclass(frozen=True)
class Phase:
    """A part of the time, named above the lanes."""

    start: float
    end: float
    label: str


def timeline(
    title: str,
    lanes: Sequence[str],
    phases: Sequence[Phase],
    spans: Sequence[Span],
    *,
    waits: Sequence[Wait] = (),
    notes: Sequence[str] = (),
) -> Drawing:
    """The lanes with their spans, arrows between them, and notes below.

    Raises KeyError for a lane that is not in ``lanes``, LabelTooWideError for a label that does
    not fit its span.
    """
    height = _HEAD + len(lanes) * _LANE + len(notes) * 18.0 + _FOOT
    drawing = Drawing(WIDTH, height, title)
    drawing.text(8, 20, title, style="head")
    top = {lane: _HEAD + index * _LANE for index, lane in enumerate(lanes)}
    bottom = _HEAD + len(lanes) * _LANE
    for phase in phases:
        left, right = _x(phase.start), _x(phase.end)
        drawing.text((left + right) / 2, 42, phase.label, style="soft", anchor="middle")
        drawing.line([(left, 50), (right, 50)])
        for edge in (left, right):
            drawing.line([(edge, 50), (edge, bottom)], dash=True)
    for lane in lanes:
        middle = top[lane] + _LANE / 2
        drawing.line([(_LABELS, middle), (WIDTH - 8, middle)])
        rows = lane.split("\n")
        drawing.text(8, middle + 5 - (len(rows) - 1) * 8.5, rows, style="head" if len(rows) else "")
    for span in spans:
        y = top[span.lane] + (_LANE - _BOX) / 2
        drawing.box(
            _x(span.start), y, _x(span.end) - _x(span.start), _BOX, span.label, kind=span.kind
        )
    for wait in waits:
        down = top[wait.to_lane] > top[wait.from_lane]
        gap = (_LANE - _BOX) / 2
        begin = top[wait.from_lane] + (_LANE - gap if down else gap)
        end = top[wait.to_lane] + (gap if down else _LANE - gap)
        drawing.arrow([(_x(wait.start), begin), (_x(wait.start), end)])
    for number, note in enumerate(notes):
        drawing.text(8, bottom + 16 + number * 18.0, note, style="soft")
    return drawing


def _x(time: float) -> float:
    return _LABELS + 8 + time * (WIDTH - _LABELS - 20) / 100
