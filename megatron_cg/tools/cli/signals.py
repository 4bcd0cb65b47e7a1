"""A command that is told to end takes what it started with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ``timeout``, batch systems and closed terminals send. Python turns SIGINT alone into an
exception; by these it dies at once, and runs on GPUs would go on, below whatever comes next."""


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise ``SystemExit`` where a signal of ``ENDING`` comes, in the main thread.

    The exit code is 128 and the signal's number, as a shell has it. A second signal ends the
    process at once. A signal that is ignored, as under ``nohup``, stays so.
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
    """Yield an event that is set once SIGINT came, which raises KeyboardInterrupt as ever.

    Where SIGINT is ignored, as for what a script starts in the background, it stays so.
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
