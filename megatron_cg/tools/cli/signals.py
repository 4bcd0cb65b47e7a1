"""Makes a command that is stopped by a signal also stop the processes it started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of ``timeout``, batch systems and closed terminals. Python converts only SIGINT to an
exception. The others would end it at once, and its runs on GPUs would continue and disturb later
ones."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise ``SystemExit`` in the main thread when a signal of ``ENDING`` arrives.

    The exit code is 128 plus the signal's number, as in a shell. A second signal ends the process
    at once. An ignored signal, as under ``nohup``, stays ignored.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for ending in chosen:
            signal.signal(ending, signal.SIG_DFL)
        raise SystemExit(128 + number)

    chosen = [ending for ending in ENDING if signal.getsignal(ending) is signal.SIG_DFL]
    with ExitStack() as undo:
        for ending in chosen:
            undo.callback(signal.signal, ending, signal.signal(ending, end))
        yield


@contextmanager
def interrupts() -> Iterator[Event]:
    """Yield an event that is set after SIGINT, which still raises KeyboardInterrupt.

    If SIGINT is ignored, as for background processes of a script, it stays ignored.
    """
    came = Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.set()
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
