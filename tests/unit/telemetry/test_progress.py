"""The bar: on a terminal of rank 0, and nowhere else."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from megatron_cg.telemetry import progress
from megatron_cg.telemetry.progress import capture_bar


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A stream to a terminal, and the end where its text comes out."""
    out, end = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with open(end, "w", encoding="utf-8") as stream:
        yield stream, out
    os.close(out)


def written(end: int) -> str:
    parts = []
    while select.select([end], [], [], 0)[0]:
        parts.append(os.read(end, 1 << 16))
    return b"".join(parts).decode()


def test_it_shows_phase_and_count_and_goes_away(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal[0])
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    bar = capture_bar(12, 8)
    assert bar is not None
    for _ in range(12):
        bar.advance()
    bar.close()
    bar.close()
    text = re.sub(r"\x1b\[[\d;]*m", "", written(terminal[1]))
    assert "warming up" in text and "capturing" in text and "12/12 passes" in text
    # Erased, and the cursor is there again.
    assert text.rstrip().endswith("\x1b[2K") and text.rfind("\x1b[?25h") > text.rfind("12/12")


def test_it_draws_from_the_calling_thread_alone(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal[0])
    before = threading.active_count()
    bar = capture_bar(4, 2)
    assert bar is not None
    bar.advance()
    assert threading.active_count() == before
    bar.close()


def test_it_is_silent_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert capture_bar(12, 8) is None
    assert stream.getvalue() == ""


def test_it_is_silent_on_other_ranks(
    terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal[0])
    monkeypatch.setattr(progress, "is_first_rank", lambda: False)
    assert capture_bar(12, 8) is None
